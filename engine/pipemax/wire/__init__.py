"""The protocol between Spark's side and an engine server: Arrow schemas, messages, error codes, a version.

One Flight ``DoExchange`` is one *session*: a Spark task sends request batches and receives completion batches.
The session opens with a ``SessionHeader`` (JSON, in the descriptor's command). After that the client sends
request batches, never more rows or bytes than it holds credit for, and half-closes when its input ends. Each
request batch says in its ``app_metadata``, in decimal, how many bytes of the credit it uses up, because the two sides
may measure a batch differently. One row may overdraw the bytes; otherwise a row larger than a grant could never pass.

The server answers with a schema whose metadata holds its versions (``VERSION_METADATA``), then sends completion batches
(any order, each row once) and, as JSON in ``app_metadata``, ``ServerMessage``s: a ``status`` heartbeat at least every
second, ``credit`` grants, ``ready`` once the engine can take rows, and ``failed`` as the last message of a session that
cannot continue. A ``status`` with the code ``engine_conflict`` says that the session waits until another job no longer
needs its engine, which may take as long as that job.

This package needs only pyarrow. Spark's side imports its names from here.
"""

from pipemax.generation import GENERATE, PAIR, POOLING_TASKS, SETTINGS, RequestError, annotation_fields
from pipemax.node.process import ProcessIdentity, pid_namespace
from pipemax.wire.generation_spec import GenerationSpec
from pipemax.wire.message_fields import fields_text, joined_parts
from pipemax.wire.preflight import PreflightReply, PreflightRequest
from pipemax.wire.row_faults import (
    RowFaultError,
    encodable,
    guarded,
    guarded_all,
    python_values,
    reason,
    shown,
)
from pipemax.wire.row_settings import row_setting
from pipemax.wire.rows import (
    COMPLETION_SCHEMA,
    FAULT_TYPE,
    IMAGE_TYPE,
    MESSAGE_TYPE,
    OVERRIDES_TYPE,
    REQUEST_SCHEMA,
    ErrorCode,
)
from pipemax.wire.session import (
    HEARTBEAT_PERIOD_S,
    CollectorAddress,
    MessageKind,
    ServerMessage,
    SessionErrorCode,
    SessionHeader,
)
from pipemax.wire.stats import (
    COLLECTOR_ACTION_STATS,
    JobOutlook,
    JobStats,
    ServerAction,
    ServerStats,
)
from pipemax.wire.version import PACKAGE_VERSION, VERSION_METADATA, WIRE_VERSION

__all__ = [
    "COLLECTOR_ACTION_STATS",
    "COMPLETION_SCHEMA",
    "FAULT_TYPE",
    "GENERATE",
    "HEARTBEAT_PERIOD_S",
    "IMAGE_TYPE",
    "MESSAGE_TYPE",
    "OVERRIDES_TYPE",
    "PACKAGE_VERSION",
    "PAIR",
    "POOLING_TASKS",
    "REQUEST_SCHEMA",
    "SETTINGS",
    "VERSION_METADATA",
    "WIRE_VERSION",
    "CollectorAddress",
    "ErrorCode",
    "GenerationSpec",
    "JobOutlook",
    "JobStats",
    "MessageKind",
    "PreflightReply",
    "PreflightRequest",
    "ProcessIdentity",
    "RequestError",
    "RowFaultError",
    "ServerAction",
    "ServerMessage",
    "ServerStats",
    "SessionErrorCode",
    "SessionHeader",
    "annotation_fields",
    "encodable",
    "fields_text",
    "guarded",
    "guarded_all",
    "joined_parts",
    "pid_namespace",
    "python_values",
    "reason",
    "row_setting",
    "shown",
]
