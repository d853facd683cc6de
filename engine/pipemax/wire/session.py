"""The messages of a session between a Spark task and an engine server."""

import json
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Self

from pipemax.node.process import ProcessIdentity
from pipemax.wire.generation_spec import GenerationSpec
from pipemax.wire.message import Message
from pipemax.wire.version import PACKAGE_VERSION, WIRE_VERSION

HEARTBEAT_PERIOD_S = 1.0
"""The server sends at least one message per session within this time; 30 s of silence mean that it hangs."""


class SessionErrorCode(StrEnum):
    """The reason why a whole session cannot continue."""

    VERSION_MISMATCH = "version_mismatch"
    """Spark's side and the engine's environment have different versions of this package."""
    INVALID_HEADER = "invalid_header"
    """The client's first message cannot be read."""
    INVALID_ENGINE_CONFIG = "invalid_engine_config"
    """The engine config has a wrong value or an unknown field."""
    INVALID_GENERATION = "invalid_generation"
    """The engine cannot honour the sampling or the response format."""
    ENGINE_CONFLICT = "engine_conflict"
    """Another engine config is in use within the same Spark stage."""
    ENGINE_START_FAILED = "engine_start_failed"
    """The model could not be loaded."""
    ENGINE_DIED = "engine_died"
    """The engine died, and the rows that it held go to its successor."""
    MACHINE_FAULT = "machine_fault"
    """The engine died of a fault of its machine, such as of a GPU: no row is suspect, and they go to its successor."""
    ENDPOINT_REFUSED = "endpoint_refused"
    """An endpoint refuses the key or the model, serves another model, or has not answered for too long."""
    ENGINE_UNUSABLE = "engine_unusable"
    """The engine dies whatever row it runs."""
    SHUTTING_DOWN = "shutting_down"
    """The server was told to end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectorAddress:
    """The address of the driver's collector, and the token that proves the right to report to it."""

    host: str
    port: int
    token: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionHeader(Message):
    """The first message of a client."""

    job_id: str
    """Groups the statistics of all sessions of one job."""
    task: str
    """A description to show, such as ``stage 3 partition 17 attempt 0``."""
    daemon: ProcessIdentity
    """The Python daemon above the client; the server ends when all known daemons are gone."""
    engine: dict[str, Any]
    """An EngineConfig, unvalidated."""
    generation: GenerationSpec = field(default_factory=GenerationSpec)
    questions: tuple[GenerationSpec, ...] = ()
    """The settings of each question of a job that asks several about a row; ``generation`` gives the system message."""
    collector: CollectorAddress | None = None
    reuses_results: bool = False
    """Whether a request takes the answer of an equal one, of any client, that the server has answered or computes now.
    A request that is sampled without a seed has no equal."""
    keys: dict[str, str] = field(default_factory=dict, repr=False)
    """The values of the environment variables that an endpoint's config names. Never logged."""
    wire_version: int = WIRE_VERSION
    package_version: str = PACKAGE_VERSION

    @classmethod
    def from_bytes(cls, text: bytes) -> Self:
        """Parse a header. Raise ``ValueError`` if it is not one of this version; check ``versions_of`` first."""
        try:
            return cls.of_json(json.loads(text))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"not a session header of wire version {WIRE_VERSION}: {error!r}") from error

    @staticmethod
    def versions_of(text: bytes) -> tuple[int | None, str | None]:
        """Return the wire and package versions of any header, even one written by another version; None if unknown."""
        try:
            values = json.loads(text)
            return values.get("wire_version"), values.get("package_version")
        except (ValueError, AttributeError):
            return None, None


class MessageKind(StrEnum):
    """The kind of a ``ServerMessage``."""

    STATUS = "status"  # heartbeat, with what the server is doing
    CREDIT = "credit"  # the client may send this much more
    READY = "ready"  # the engine has loaded
    FAILED = "failed"  # the session is over; code and detail say why


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerMessage(Message):
    """A message of the server: one JSON object in ``app_metadata``."""

    kind: MessageKind
    detail: str = ""
    """What to show the user: the state in STATUS, the reason and remedy in FAILED."""
    credit_rows: int = 0
    credit_bytes: int = 0
    code: SessionErrorCode | None = None
