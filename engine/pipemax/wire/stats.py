"""What a server reports of itself and its jobs, and what a job's collector answers."""

import json
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any, Self

from pipemax.generation import Spent
from pipemax.wire.message import Message


class ServerAction(StrEnum):
    """The Flight actions of an engine server; each takes no body and answers with one JSON object."""

    HEALTH = "health"  # a ServerStats without its jobs; also while an engine loads
    STATS = "stats"  # a ServerStats
    SHUTDOWN = "shutdown"  # ends the server once it has answered


COLLECTOR_ACTION_STATS = "stats"
"""The collector's only Flight action: its body is a ``ServerStats``; the ``authorization`` header is
``Bearer TOKEN``. It answers with a ``JobOutlook``, or nothing if the job's size is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobStats:
    """One job's totals on one server since that server started."""

    rows_received: int = 0
    rows_done: int = 0
    """Completions handed to the client, error rows included."""
    rows_reused: int = 0
    """Rows of these that took the answer of an equal request, without the engine."""
    errors: dict[str, int] = field(default_factory=dict)
    """ErrorCode → rows."""
    error_examples: dict[str, str] = field(default_factory=dict)
    """ErrorCode → the first message seen with it."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    spent: Spent = field(default_factory=Spent)
    """What an endpoint was asked for the job's rows, those among them whose task died before it had their answers."""
    length_correlation: float | None = None
    """The correlation of prompt and answer lengths, from -1 to 1; None until enough rows have ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOutlook(Message):
    """A collector's answer to a report: the rest of its job, over all engines."""

    job_id: str
    rows_left: int
    """Rows that no engine has received yet, according to the reports."""
    engines: int
    """Servers that report."""
    report_after_s: float = 0.0
    """Minimum time until the sender's next report, so that many senders do not keep the driver busy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerStats(Message):
    """A server's report to the collector every few seconds, and its answer to the ``stats`` action."""

    server_id: str
    host: str
    pid: int
    at_unix_s: float
    state: str
    """``starting`` | ``loading`` | ``ready`` | ``failed`` | ``stopping``."""
    detail: str = ""
    """What to show the user: what the server is loading, or why it failed."""
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
    tuning: str = ""
    """What the tuning of the engine's limits came to, in one line; empty until then, and where there is none."""
    replicas: list[dict[str, Any]] = field(default_factory=list)
    """Each replica's figures by name (``state``, ``restarts``, ``rows_done``, ``completion_tokens``, …) since its first
    start; empty for an engine without replicas. The figures above are then those of all together."""
    gpus: list[str] = field(default_factory=list)
    """The UUIDs of the server's GPUs; empty without any."""
    metrics_port: int | None = None
    """The port at which the server serves its figures to Prometheus; None if it does not."""
    machine_fault: str = ""
    """The fault of the machine, such as of a GPU, that the engine died of; empty if it did not."""
    jobs: dict[str, JobStats] = field(default_factory=dict)

    @classmethod
    def from_bytes(cls, text: bytes) -> Self:
        """Read a report, which may be of another version; leave out what this one does not know."""
        known = {column.name for column in fields(cls)}
        return cls.of_json({name: value for name, value in json.loads(text).items() if name in known})
