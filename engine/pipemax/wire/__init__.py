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

from pipemax.endpoint_keys import secret_variables as secret_variables
from pipemax.generation import GENERATE as GENERATE
from pipemax.generation import PAIR as PAIR
from pipemax.generation import SETTINGS as SETTINGS
from pipemax.generation import RequestError as RequestError
from pipemax.generation import Spent as Spent
from pipemax.generation import annotation_fields as annotation_fields
from pipemax.node.process import ProcessIdentity as ProcessIdentity
from pipemax.node.process import pid_namespace as pid_namespace
from pipemax.wire.generation_spec import GenerationSpec as GenerationSpec
from pipemax.wire.message_fields import fields_text as fields_text
from pipemax.wire.message_fields import joined_parts as joined_parts
from pipemax.wire.preflight import PreflightReply as PreflightReply
from pipemax.wire.preflight import PreflightRequest as PreflightRequest
from pipemax.wire.row_faults import RowFaultError as RowFaultError
from pipemax.wire.row_faults import encodable as encodable
from pipemax.wire.row_faults import guarded as guarded
from pipemax.wire.row_faults import guarded_all as guarded_all
from pipemax.wire.row_faults import python_values as python_values
from pipemax.wire.row_faults import reason as reason
from pipemax.wire.row_faults import shown as shown
from pipemax.wire.row_settings import row_setting as row_setting
from pipemax.wire.rows import COMPLETION_SCHEMA as COMPLETION_SCHEMA
from pipemax.wire.rows import FAULT_TYPE as FAULT_TYPE
from pipemax.wire.rows import IMAGE_TYPE as IMAGE_TYPE
from pipemax.wire.rows import MESSAGE_TYPE as MESSAGE_TYPE
from pipemax.wire.rows import OVERRIDES_TYPE as OVERRIDES_TYPE
from pipemax.wire.rows import REFUSED as REFUSED
from pipemax.wire.rows import REQUEST_SCHEMA as REQUEST_SCHEMA
from pipemax.wire.rows import ErrorCode as ErrorCode
from pipemax.wire.session import HEARTBEAT_PERIOD_S as HEARTBEAT_PERIOD_S
from pipemax.wire.session import CollectorAddress as CollectorAddress
from pipemax.wire.session import MessageKind as MessageKind
from pipemax.wire.session import ServerMessage as ServerMessage
from pipemax.wire.session import SessionErrorCode as SessionErrorCode
from pipemax.wire.session import SessionHeader as SessionHeader
from pipemax.wire.stats import COLLECTOR_ACTION_STATS as COLLECTOR_ACTION_STATS
from pipemax.wire.stats import JobOutlook as JobOutlook
from pipemax.wire.stats import JobStats as JobStats
from pipemax.wire.stats import ServerAction as ServerAction
from pipemax.wire.stats import ServerStats as ServerStats
from pipemax.wire.version import PACKAGE_VERSION as PACKAGE_VERSION
from pipemax.wire.version import VERSION_METADATA as VERSION_METADATA
from pipemax.wire.version import WIRE_VERSION as WIRE_VERSION
