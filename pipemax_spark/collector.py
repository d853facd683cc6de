"""The driver's ear: engine servers report here every few seconds, and progress and totals are read from it.

A Flight server with one action and a token. Totals are per server since its start, so the latest report of each
server, living or dead, is all that is kept.
"""

import secrets
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from pyarrow import flight

from pipemax.wire import COLLECTOR_ACTION_STATS, CollectorAddress, JobStats, ServerStats

_SILENT_S = 30.0
"""A server not heard of for so long no longer counts as running."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """One job over all servers."""

    rows_done: int = 0
    errors: dict[str, int] = field(default_factory=dict)
    error_examples: dict[str, str] = field(default_factory=dict)
    prompt_tokens: int = 0
    completion_tokens: int = 0

    @property
    def rows_error(self) -> int:
        return sum(self.errors.values())

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


class Collector:
    """Listens from entry to exit."""

    def __init__(self, host: str, job_id: str) -> None:
        self._host = host
        self._job_id = job_id
        self._token = secrets.token_urlsafe(24)
        self._lock = threading.Lock()
        self._latest: dict[str, tuple[float, ServerStats]] = {}

    def __enter__(self) -> "Collector":
        # All interfaces: the driver's advertised address may be one that it cannot bind (a container's host).
        self._server = _StatsServer("grpc+tcp://0.0.0.0:0", self._token, self._take)
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()

    @property
    def address(self) -> CollectorAddress:
        return CollectorAddress(host=self._host, port=self._server.port, token=self._token)

    def servers(self) -> list[ServerStats]:
        """The latest word of each server that still reports."""
        with self._lock:
            return [
                stats for heard_s, stats in self._latest.values() if time.monotonic() - heard_s < _SILENT_S
            ]

    def totals(self) -> Totals:
        with self._lock:
            jobs = [stats.jobs.get(self._job_id, JobStats()) for _, stats in self._latest.values()]
        errors: Counter[str] = Counter()
        examples: dict[str, str] = {}
        for job in jobs:
            errors.update(job.errors)
            examples.update(job.error_examples)
        return Totals(
            rows_done=sum(job.rows_done for job in jobs),
            errors=dict(errors),
            error_examples=examples,
            prompt_tokens=sum(job.prompt_tokens for job in jobs),
            completion_tokens=sum(job.completion_tokens for job in jobs),
        )

    def engines(self) -> int:
        """Servers that have done rows of this job."""
        with self._lock:
            return sum(1 for _, stats in self._latest.values() if self._job_id in stats.jobs)

    def _take(self, stats: ServerStats) -> None:
        with self._lock:
            known = self._latest.get(stats.server_id)
            # Reports may overtake one another on their way.
            if known is None or known[1].at_unix_s <= stats.at_unix_s:
                self._latest[stats.server_id] = (time.monotonic(), stats)


class _TokenCheck(flight.ServerMiddlewareFactory):
    def __init__(self, token: str) -> None:
        super().__init__()
        self._expected = f"Bearer {token}"

    def start_call(self, info: flight.CallInfo, headers: dict[str, list[str]]) -> None:
        given = next((values[0] for name, values in headers.items() if name.lower() == "authorization"), "")
        if not secrets.compare_digest(given, self._expected):
            raise flight.FlightUnauthenticatedError("the collector's token is missing or wrong")


class _StatsServer(flight.FlightServerBase):
    def __init__(self, location: str, token: str, take: Any) -> None:
        super().__init__(location, middleware={"token": _TokenCheck(token)})
        self._take = take

    def do_action(self, context: flight.ServerCallContext, action: flight.Action) -> list[bytes]:
        if action.type != COLLECTOR_ACTION_STATS:
            raise flight.FlightServerError(f"the collector knows no action {action.type!r}")
        self._take(ServerStats.from_bytes(action.body.to_pybytes()))
        return []
