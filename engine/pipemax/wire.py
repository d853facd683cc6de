"""Define the protocol between Spark's side and an engine server: Arrow schemas, messages, error codes, a version.

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

This module needs only pyarrow; it is the only module of ``pipemax`` that ``pipemax_spark`` imports.
"""

import json
from dataclasses import asdict, dataclass, field, fields
from enum import StrEnum
from typing import Any, Self

import pyarrow as pa

import pipemax
from pipemax.generation import GENERATE, PAIR, POOLING_TASKS, Sampling
from pipemax.node.process import ProcessIdentity, pid_namespace

__all__ = [
    "COLLECTOR_ACTION_STATS",
    "COMPLETION_SCHEMA",
    "GENERATE",
    "HEARTBEAT_PERIOD_S",
    "IMAGE_TYPE",
    "MESSAGE_TYPE",
    "OVERRIDES_TYPE",
    "PACKAGE_VERSION",
    "PAIR",
    "POOLING_TASKS",
    "REQUEST_SCHEMA",
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
    "ServerAction",
    "ServerMessage",
    "ServerStats",
    "SessionErrorCode",
    "SessionHeader",
    "pid_namespace",
]

PACKAGE_VERSION = pipemax.__version__
WIRE_VERSION = 6
"""Incremented whenever a schema or message below changes its meaning; both sides must agree exactly."""

VERSION_METADATA = {
    b"pipemax_wire_version": str(WIRE_VERSION).encode(),
    b"pipemax_package_version": PACKAGE_VERSION.encode(),
}
"""Metadata of the server's answer schema, so that the client can check the version too."""

HEARTBEAT_PERIOD_S = 1.0
"""The server sends at least one message per session within this time; 30 s of silence mean that it hangs."""

OVERRIDES_TYPE = pa.struct(
    [
        ("max_tokens", pa.int32()),
        ("temperature", pa.float64()),
        ("top_p", pa.float64()),
        ("top_k", pa.int32()),
        ("seed", pa.int64()),
        ("stop", pa.list_(pa.string())),
        ("lora", pa.string()),
    ]
)
"""Per-row sampling: a null field, or a null struct, keeps the job's value."""

IMAGE_TYPE = pa.struct([("content", pa.binary()), ("source", pa.string())])
"""An image: its bytes, or a path or URL at which the engine finds it."""

MESSAGE_TYPE = pa.struct(
    [
        ("role", pa.string()),
        ("content", pa.string()),
        ("parts", pa.list_(pa.struct([("text", pa.string()), ("image", IMAGE_TYPE)]))),
    ]
)
"""A turn of a conversation: text, or parts in place of it, each of which is a text or an image."""

REQUEST_SCHEMA = pa.schema(
    [
        pa.field("row_id", pa.int64(), nullable=False),  # the client's number, unique within the session
        pa.field("prompt", pa.string()),  # one of prompt and messages; both null is an error row
        pa.field("messages", pa.list_(MESSAGE_TYPE)),
        pa.field("images", pa.list_(IMAGE_TYPE)),  # before the text of the prompt
        pa.field("overrides", OVERRIDES_TYPE),
        pa.field("question", pa.int32()),  # place in the header's questions; null: the header's generation
    ]
)

COMPLETION_SCHEMA = pa.schema(
    [
        pa.field("row_id", pa.int64(), nullable=False),
        pa.field("text", pa.string()),  # null in an error row, unless the error is that the text is invalid
        pa.field("finish_reason", pa.string()),  # "stop" | "length" | "abort", null in an error row
        pa.field("prompt_tokens", pa.int32()),
        pa.field("completion_tokens", pa.int32()),
        pa.field("error_code", pa.string()),  # an ErrorCode, null when the row succeeded
        pa.field("error_message", pa.string()),
        pa.field("completed_at", pa.timestamp("us", tz="UTC"), nullable=False),
        # Null unless the job asks for them; see ``pipemax.generation.Completion``.
        pa.field("reasoning", pa.string()),
        pa.field("reasoning_tokens", pa.int32()),
        pa.field("logprob_sum", pa.float64()),
        pa.field("logprob_mean", pa.float64()),
        pa.field("probabilities", pa.map_(pa.string(), pa.float64())),
        pa.field("samples", pa.list_(pa.string())),
        pa.field("agreement", pa.float64()),
        pa.field("attempts", pa.int32()),
        pa.field("embedding", pa.list_(pa.float32())),
        pa.field("label", pa.string()),
        pa.field("score", pa.float64()),
    ]
)


class ErrorCode(StrEnum):
    """The error codes of rows. This is the only list of them: tables, metrics and docs use these names."""

    EMPTY_PROMPT = "empty_prompt"
    """The prompt is null, empty or blank."""
    PROMPT_TOO_LONG = "prompt_too_long"
    """The prompt and one output token (none, for a pooling task) exceed ``max_model_len``."""
    INVALID_PROMPT = "invalid_prompt"
    """Messages that the chat template cannot render, or text that is not UTF-8."""
    INVALID_IMAGE = "invalid_image"
    """An image is missing, is no image, is larger than allowed, or may not be fetched."""
    INVALID_PARAMETER = "invalid_parameter"
    """A per-row override is out of range."""
    RESPONSE_FORMAT = "response_format"
    """The output does not match its schema, choice, regular expression or grammar, for instance because ``max_tokens``
    cut it off."""
    REASONING_UNFINISHED = "reasoning_unfinished"
    """The model's thinking ended before an answer began, for instance because ``max_tokens`` cut it off."""
    ENGINE_ERROR = "engine_error"
    """The engine refused or failed only this row."""
    ENGINE_DIED = "engine_died"
    """The engine died whenever it ran this row by itself."""


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
class GenerationSpec(Sampling):
    """The settings for generating every row of a job.

    With temperature > 0, a row's seed is derived from ``seed`` and the row's prompt.
    """

    system: str | None = None
    """System message to put before every prompt; needs a model with a chat template."""

    def __post_init__(self) -> None:
        """Accept whatever a client sends; ``sampling`` checks it on the engine's side, once per session."""

    def sampling(self) -> Sampling:
        """Return the job's sampling. Raise ``ValueError`` that names the wrong value and the allowed ones."""
        if self.is_pooling and self.system is not None:
            raise ValueError(
                f"task {self.task} holds no conversation, so it takes no system message; put the text into the prompt "
                "template"
            )
        for name, kind in (
            ("response_format", "JSON schema object"),
            ("chat_template_kwargs", "JSON object"),
        ):
            if (text := getattr(self, name)) is None:
                continue
            try:
                value = json.loads(text)
            except ValueError as error:
                raise ValueError(f"{name} is not JSON: {error}") from None
            if not isinstance(value, dict):
                raise ValueError(f"{name} must be a {kind}, not a {type(value).__name__}")
        return Sampling(**{field.name: getattr(self, field.name) for field in fields(Sampling)})

    @classmethod
    def of_json(cls, values: dict[str, Any]) -> Self:
        """Return the spec that became these plain values."""
        return cls(**{**values, "stop": tuple(values["stop"]), "choice": tuple(values["choice"])})


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionHeader:
    """The first message of a client."""

    job_id: str
    """Groups the statistics of all sessions of one job."""
    task: str
    """Text for people, such as ``stage 3 partition 17 attempt 0``."""
    client: ProcessIdentity
    """The Python worker; the session ends with it."""
    daemon: ProcessIdentity
    """The Python daemon above it; the server ends when all known daemons are gone."""
    engine: dict[str, Any]
    """An EngineConfig, unvalidated."""
    generation: GenerationSpec = field(default_factory=GenerationSpec)
    questions: tuple[GenerationSpec, ...] = ()
    """The settings of each question of a job that asks several about a row; ``generation`` gives the system message."""
    collector: CollectorAddress | None = None
    reuses_results: bool = False
    """Whether a request takes the answer of an equal one, of any client, that the server has answered or computes now.
    A request that is sampled without a seed has no equal."""
    wire_version: int = WIRE_VERSION
    package_version: str = PACKAGE_VERSION

    def to_bytes(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_bytes(cls, text: bytes) -> Self:
        """Parse a header. Raise ``ValueError`` if it is not one of this version; check ``versions_of`` first."""
        try:
            values = json.loads(text)
            generation = values["generation"]
            collector = values["collector"]
            return cls(
                **{
                    **values,
                    "client": ProcessIdentity(**values["client"]),
                    "daemon": ProcessIdentity(**values["daemon"]),
                    "generation": GenerationSpec.of_json(generation),
                    "questions": tuple(GenerationSpec.of_json(each) for each in values["questions"]),
                    "collector": CollectorAddress(**collector) if collector else None,
                }
            )
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


class ServerAction(StrEnum):
    """The Flight actions of an engine server; each takes no body and answers with one JSON object."""

    HEALTH = "health"  # a ServerStats without its jobs; also while an engine loads
    STATS = "stats"  # a ServerStats
    SHUTDOWN = "shutdown"  # ends the server once it has answered


COLLECTOR_ACTION_STATS = "stats"
LENGTH_CORRELATION = "length_correlation"
"""Engine metric: the correlation of prompt and answer lengths, once enough rows have ended."""
"""The collector's only Flight action: its body is a ``ServerStats``; the ``authorization`` header is
``Bearer TOKEN``. It answers with a ``JobOutlook``, or nothing if the job's size is not known."""


class MessageKind(StrEnum):
    """The kind of a ``ServerMessage``."""

    STATUS = "status"  # heartbeat, with what the server is doing
    CREDIT = "credit"  # the client may send this much more
    READY = "ready"  # the engine has loaded
    FAILED = "failed"  # the session is over; code and detail say why


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerMessage:
    """A message of the server: one JSON object in ``app_metadata``."""

    kind: MessageKind
    detail: str = ""
    """Text for people: the state in STATUS, the reason and remedy in FAILED."""
    credit_rows: int = 0
    credit_bytes: int = 0
    code: SessionErrorCode | None = None

    def to_bytes(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_bytes(cls, text: bytes) -> Self:
        values = json.loads(text)
        code = values["code"]
        return cls(
            **{
                **values,
                "kind": MessageKind(values["kind"]),
                "code": SessionErrorCode(code) if code else None,
            }
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class JobStats:
    """One job's totals on one server since that server started."""

    rows_received: int = 0
    rows_done: int = 0
    """Completions handed to the client, error rows included."""
    rows_reused: int = 0
    """Rows of these that took the outcome of an equal request, without the engine."""
    errors: dict[str, int] = field(default_factory=dict)
    """ErrorCode → rows."""
    error_examples: dict[str, str] = field(default_factory=dict)
    """ErrorCode → the first message seen with it."""
    prompt_tokens: int = 0
    completion_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOutlook:
    """A collector's answer to a report: the rest of its job, over all engines."""

    job_id: str
    rows_left: int
    """Rows that no engine has received yet, according to the reports."""
    engines: int
    """Servers that report."""
    report_after_s: float = 0.0
    """Minimum time until the sender's next report, so that many senders do not keep the driver busy."""

    def to_bytes(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_bytes(cls, text: bytes) -> Self:
        return cls(**json.loads(text))


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerStats:
    """A server's report to the collector every few seconds, and its answer to the ``stats`` action."""

    server_id: str
    host: str
    pid: int
    at_unix_s: float
    state: str
    """``starting`` | ``loading`` | ``ready`` | ``failed`` | ``stopping``."""
    detail: str = ""
    """Text for people: what the server is loading, or why it failed."""
    engine_id: str = ""
    """A digest of the loaded engine's config; empty while there is none."""
    engine_starts: int = 0
    phase: str = "idle"
    """``idle`` | ``prefill`` | ``decode`` | ``mixed``."""
    running_requests: int = 0
    waiting_requests: int = 0
    open_sessions: int = 0
    """Tasks that use the server now, including those that wait for their engine."""
    kv_usage: float = 0.0
    """Share of the GPU's KV blocks in use, 0 to 1."""
    window_rows: int = 0
    """Maximum rows that the server has in the engine or granted to its streams: its memory has room for them. 0 while
    there is no engine."""
    engine_metrics: dict[str, float] = field(default_factory=dict)
    """Further figures of the engine, for MLflow: name → value."""
    policy: dict[str, Any] = field(default_factory=dict)
    """The engine's policy, and why: ``chosen``, ``reason``, ``predicted_tokens_per_s`` and ``inputs``; empty while
    there is no engine."""
    replicas: list[dict[str, Any]] = field(default_factory=list)
    """Each replica's figures by name (``state``, ``restarts``, ``rows_done``, ``completion_tokens``, …) since its first
    start; empty for an engine without replicas. The figures above are then those of all together."""
    jobs: dict[str, JobStats] = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_bytes(cls, text: bytes) -> Self:
        values = json.loads(text)
        known = {f.name for f in fields(cls)}
        jobs = {job_id: JobStats(**job) for job_id, job in values.get("jobs", {}).items()}
        return cls(**{**{name: value for name, value in values.items() if name in known}, "jobs": jobs})


@dataclass(frozen=True, slots=True, kw_only=True)
class PreflightRequest:
    """The request that ``python -m pipemax preflight`` reads from standard input before any engine starts."""

    engine: dict[str, Any]
    generation: GenerationSpec
    questions: tuple[GenerationSpec, ...] = ()
    """As in ``SessionHeader``; they are only checked."""
    prompts: list[str | None] = field(default_factory=list)
    """Sampled rows' prompts (or, for ``--messages-column``, their joined text), which are only counted, never run."""
    rows: int | None = None
    """Number of rows in the sampled table, if known."""
    has_images: bool = False
    """Whether rows have images, which the model must then take."""

    def to_bytes(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_bytes(cls, text: bytes) -> Self:
        values = json.loads(text)
        return cls(
            **{
                **values,
                "generation": GenerationSpec.of_json(values["generation"]),
                "questions": tuple(GenerationSpec.of_json(each) for each in values["questions"]),
            }
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PreflightReply:
    """The reply that ``python -m pipemax preflight`` writes to standard output: one JSON line."""

    error_code: SessionErrorCode | None = None
    error: str = ""
    """One sentence that gives the value and the remedy; empty if engine and generation are fine."""
    model: str = ""
    model_fingerprint: str = ""
    """Changes when the model's files change, wherever they are: for a local directory a digest of names, sizes, whole
    small files and samples of large ones; for a hub name the resolved revision."""
    max_model_len: int = 0
    has_chat_template: bool = False
    prompt_tokens: list[int] = field(default_factory=list)
    """Tokens of each prompt of the request as the engine would see it, system message and chat template included."""
    first_prompt: str = ""
    """The first sampled prompt as the model would see it."""
    engine: dict[str, Any] = field(default_factory=dict)
    """The engine config with every default filled in."""
    row_lengths: dict[str, Any] | None = None
    """Lengths of the rows to come, from the sampled prompts, for the engine config under ``policy: auto``."""
    expected_rows: int | None = None
    """Approximate number of rows like the sampled ones that an engine's host pools will hold; None if unknown."""
    versions: dict[str, str] = field(default_factory=dict)
    """Package → version in the engine's environment."""

    def to_bytes(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_bytes(cls, text: bytes) -> Self:
        values = json.loads(text)
        code = values["error_code"]
        return cls(**{**values, "error_code": SessionErrorCode(code) if code else None})
