"""Count the server's work for each job, and learn of its rows' lengths. The counters only grow."""

import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from pipemax.api import Completion
from pipemax.generation import Spent
from pipemax.serve.flow.length_relation import LengthRelation
from pipemax.wire import CollectorAddress, JobStats

MAX_JOBS = 256
"""Finished jobs beyond this many are forgotten, the least recently used first."""


@dataclass(slots=True)
class _Job:
    collector: CollectorAddress | None = None
    open_sessions: int = 0
    stats: JobStats = field(default_factory=JobStats)
    lengths: LengthRelation = field(default_factory=LengthRelation)


class StatsBook:
    """Totals by job. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._jobs: dict[str, _Job] = {}

    def open_session(self, job_id: str, collector: CollectorAddress | None) -> None:
        with self._lock:
            job = self._jobs.pop(job_id, None) or _Job()
            job.collector = collector or job.collector
            job.open_sessions += 1
            self._jobs[job_id] = job  # last in the order of use
            self._forget_old()

    def close_session(self, job_id: str) -> CollectorAddress | None:
        """Return the job's collector if this was its last open session, which calls for a last report."""
        with self._lock:
            job = self._jobs[job_id]
            job.open_sessions -= 1
            return job.collector if job.open_sessions == 0 else None

    def count_received(self, job_id: str, rows: int) -> None:
        with self._lock:
            job = self._jobs[job_id]
            job.stats = replace(job.stats, rows_received=job.stats.rows_received + rows)

    def received(self, job_id: str) -> int:
        """Return how many rows of the job have come so far; 0 for an unknown job."""
        with self._lock:
            return self._jobs[job_id].stats.rows_received if job_id in self._jobs else 0

    def count_done(self, job_id: str, completions: Sequence[Completion]) -> None:
        """Count completions that were handed to the client."""
        errors = [completion.error for completion in completions if completion.error is not None]
        with self._lock:
            job = self._jobs[job_id]
            job.lengths.observe(completions)
            stats = job.stats
            examples = dict(stats.error_examples)
            for error in errors:
                examples.setdefault(str(error.code), error.message)
            job.stats = replace(
                stats,
                rows_done=stats.rows_done + len(completions),
                # The outcome of a row without a prompt, say, is no answer, and nothing is spared by it.
                rows_reused=stats.rows_reused + sum(c.is_reused and c.error is None for c in completions),
                prompt_tokens=stats.prompt_tokens + sum(c.prompt_tokens for c in completions),
                completion_tokens=stats.completion_tokens + sum(c.completion_tokens for c in completions),
                errors=dict(Counter(stats.errors) + Counter(str(error.code) for error in errors)),
                error_examples=examples,
            )

    def count_spent(self, job_id: str, spent: Spent) -> None:
        """Count what an endpoint was asked for rows, whether their client still waits for them or not."""
        with self._lock:
            if (job := self._jobs.get(job_id)) is not None:
                job.stats = replace(job.stats, spent=job.stats.spent + spent)

    def collectors(self) -> set[CollectorAddress]:
        """Return the collectors to report to: those of jobs with an open session."""
        with self._lock:
            return {t.collector for t in self._jobs.values() if t.collector and t.open_sessions}

    def jobs(self, collector: CollectorAddress | None = None) -> dict[str, JobStats]:
        """Return the statistics of all jobs, or of those that report to one collector."""
        with self._lock:
            return {
                job_id: replace(job.stats, length_correlation=job.lengths.correlation())
                for job_id, job in self._jobs.items()
                if collector is None or job.collector == collector
            }

    def _forget_old(self) -> None:
        for job_id in list(self._jobs):
            if len(self._jobs) <= MAX_JOBS:
                return
            if self._jobs[job_id].open_sessions == 0:
                del self._jobs[job_id]
