"""Count the server's work for each job. The counters only grow."""

import threading
from collections.abc import Iterable
from dataclasses import dataclass, field

from pipemax.api import Completion
from pipemax.wire import CollectorAddress, JobStats

MAX_JOBS = 256
"""Finished jobs beyond this many are forgotten, the least recently used first."""


@dataclass(slots=True)
class _Totals:
    collector: CollectorAddress | None = None
    open_sessions: int = 0
    rows_received: int = 0
    rows_done: int = 0
    rows_reused: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    errors: dict[str, int] = field(default_factory=dict)
    error_examples: dict[str, str] = field(default_factory=dict)

    def stats(self) -> JobStats:
        return JobStats(
            rows_received=self.rows_received,
            rows_done=self.rows_done,
            rows_reused=self.rows_reused,
            errors=dict(self.errors),
            error_examples=dict(self.error_examples),
            prompt_tokens=self.prompt_tokens,
            completion_tokens=self.completion_tokens,
        )


class StatsBook:
    """Totals by job. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._jobs: dict[str, _Totals] = {}

    def open_session(self, job_id: str, collector: CollectorAddress | None) -> None:
        with self._lock:
            totals = self._jobs.pop(job_id, None) or _Totals()
            totals.collector = collector or totals.collector
            totals.open_sessions += 1
            self._jobs[job_id] = totals  # last in the order of use
            self._forget_old()

    def close_session(self, job_id: str) -> CollectorAddress | None:
        """Return the job's collector if this was its last open session, which calls for a last report."""
        with self._lock:
            totals = self._jobs[job_id]
            totals.open_sessions -= 1
            return totals.collector if totals.open_sessions == 0 else None

    def count_received(self, job_id: str, rows: int) -> None:
        with self._lock:
            self._jobs[job_id].rows_received += rows

    def received(self, job_id: str) -> int:
        """Return how many rows of the job have come so far; 0 for an unknown job."""
        with self._lock:
            return self._jobs[job_id].rows_received if job_id in self._jobs else 0

    def count_done(self, job_id: str, completions: Iterable[Completion]) -> None:
        """Count completions that were handed to the client."""
        with self._lock:
            totals = self._jobs[job_id]
            for completion in completions:
                totals.rows_done += 1
                # The outcome of a row without a prompt, say, is no answer, and nothing is spared by it.
                totals.rows_reused += completion.is_reused and completion.error is None
                totals.prompt_tokens += completion.prompt_tokens
                totals.completion_tokens += completion.completion_tokens
                if completion.error is not None:
                    code = str(completion.error.code)
                    totals.errors[code] = totals.errors.get(code, 0) + 1
                    totals.error_examples.setdefault(code, completion.error.message)

    def collectors(self) -> set[CollectorAddress]:
        """Return the collectors to report to: those of jobs with an open session."""
        with self._lock:
            return {t.collector for t in self._jobs.values() if t.collector and t.open_sessions}

    def jobs(self, collector: CollectorAddress | None = None) -> dict[str, JobStats]:
        """Return the statistics of all jobs, or of those that report to one collector."""
        with self._lock:
            return {
                job_id: totals.stats()
                for job_id, totals in self._jobs.items()
                if collector is None or totals.collector == collector
            }

    def _forget_old(self) -> None:
        for job_id in list(self._jobs):
            if len(self._jobs) <= MAX_JOBS:
                return
            if self._jobs[job_id].open_sessions == 0:
                del self._jobs[job_id]
