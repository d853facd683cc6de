"""One job's totals over all engine servers and tasks, kept up to date report by report.

A report holds totals since its sender's start, so it replaces its sender's previous report, and the difference is
added. Taking a report, and asking for totals, costs the same however many senders there have been. Reports may come
again, late and out of order. Less is kept for a sender as it ends: the whole report of a server that reports, the job's
counts of a server that has fallen silent and may come back, and 16 bytes of a task that has ended, to recognise its
late reports.
"""

import hashlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from pipemax.wire import JobStats, ServerStats, Spent
from pipemax_spark.executor.task_reports import TASK_ENDED_STATE, is_from_task

SILENT_S = 30.0
"""A server that has not been heard of for this long no longer counts as running."""


@dataclass(slots=True, kw_only=True)
class Totals:
    """Sums over the latest report of each server and task. Rows that a retried task did again count again."""

    rows_done: int = 0
    rows_reused: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    """ErrorCode → rows."""
    error_examples: dict[str, str] = field(default_factory=dict)
    """ErrorCode → a message."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    spent: Spent = field(default_factory=Spent)
    """What an endpoint was asked, also for rows whose task has died."""
    rows_taken: int = 0
    """Rows that reporting servers have received and silent ones have completed: the silent ones' other rows go to
    others."""

    @property
    def rows_error(self) -> int:
        return self.errors.total()

    @property
    def errors_with_examples(self) -> dict[str, tuple[int, str]]:
        """ErrorCode → (rows, a message)."""
        return {code: (rows, self.error_examples.get(code, "")) for code, rows in self.errors.items()}

    def exchange(self, old: JobStats, new: JobStats) -> None:
        """Count a report in the place of its sender's last one."""
        self.rows_done += new.rows_done - old.rows_done
        self.rows_reused += new.rows_reused - old.rows_reused
        self.prompt_tokens += new.prompt_tokens - old.prompt_tokens
        self.completion_tokens += new.completion_tokens - old.completion_tokens
        self.spent += new.spent - old.spent
        if new.errors != old.errors:
            self.errors.update(new.errors)
            self.errors.subtract(old.errors)
        for code, message in new.error_examples.items():
            self.error_examples.setdefault(code, message)


@dataclass(frozen=True, slots=True)
class _Heard:
    """A server that reports."""

    at_s: float
    """By the driver's clock."""
    stats: ServerStats
    job: JobStats


@dataclass(frozen=True, slots=True)
class _Known:
    """The record of a running task, or of a server that has fallen silent: the job's part of its latest report."""

    at_unix_s: float
    """By the sender's clock."""
    job: JobStats


class ReportTotals:
    """The totals. Not thread-safe: the owner lets in one thread at a time."""

    def __init__(self, job_of: Callable[[ServerStats], JobStats]) -> None:
        """Sum up the part of each report that ``job_of`` returns."""
        self._job_of = job_of
        self._totals = Totals()
        self._reporting: dict[str, _Heard] = {}
        """Server → its latest report, in the order in which they came."""
        self._silent: dict[str, _Known] = {}
        self._servers_with_rows: set[str] = set()
        self._tasks: dict[str, _Known] = {}
        self._ended_tasks: set[bytes] = set()

    def take(self, stats: ServerStats, *, now_s: float) -> bool:
        """Take a report; return False if a later one of its sender, or a task's last one, came before it."""
        if is_from_task(stats):
            return self._take_task(stats)
        return self._take_server(stats, now_s)

    def totals(self) -> Totals:
        """Return the present totals, which later reports do not change."""
        examples = dict(self._totals.error_examples)
        return replace(self._totals, errors=+self._totals.errors, error_examples=examples)

    def servers(self, *, now_s: float) -> list[ServerStats]:
        """Return the latest report of each server that still reports, sorted by name."""
        self._note_silence(now_s)
        return [self._reporting[server_id].stats for server_id in sorted(self._reporting)]

    def num_servers(self, *, now_s: float) -> int:
        """Return how many servers still report."""
        self._note_silence(now_s)
        return len(self._reporting)

    def num_tasks(self) -> int:
        """Return how many tasks have reported errors and not their end."""
        return len(self._tasks)

    def num_servers_with_rows(self) -> int:
        """Return how many servers, reporting or silent, have done rows of the job."""
        return len(self._servers_with_rows)

    def rows_taken(self, *, now_s: float) -> int:
        """Return how many rows engines have received, without those that fell silent before they had done them."""
        self._note_silence(now_s)
        return self._totals.rows_taken

    def _take_task(self, stats: ServerStats) -> bool:
        digest = hashlib.blake2b(stats.server_id.encode(), digest_size=16).digest()
        known = self._tasks.get(stats.server_id)
        has_ended = stats.state == TASK_ENDED_STATE
        if digest in self._ended_tasks:
            return False
        # The last report counts even if the sender's clock was set back.
        if not has_ended and known is not None and known.at_unix_s > stats.at_unix_s:
            return False
        job = self._job_of(stats)
        self._totals.exchange(_NO_ROWS if known is None else known.job, job)
        if has_ended:
            self._tasks.pop(stats.server_id, None)
            self._ended_tasks.add(digest)
        else:
            self._tasks[stats.server_id] = _Known(stats.at_unix_s, job)
        return True

    def _take_server(self, stats: ServerStats, now_s: float) -> bool:
        self._note_silence(now_s)
        server_id, job = stats.server_id, self._job_of(stats)
        heard, silent = self._reporting.get(server_id), self._silent.get(server_id)
        if heard is not None:
            at_unix_s, before, taken = heard.stats.at_unix_s, heard.job, heard.job.rows_received
        elif silent is not None:
            at_unix_s, before, taken = silent.at_unix_s, silent.job, silent.job.rows_done
        else:
            at_unix_s, before, taken = stats.at_unix_s, _NO_ROWS, 0
        if stats.at_unix_s < at_unix_s:
            return False
        self._reporting.pop(server_id, None)
        self._silent.pop(server_id, None)
        self._reporting[server_id] = _Heard(now_s, stats, job)
        self._totals.exchange(before, job)
        self._totals.rows_taken += job.rows_received - taken
        if job.rows_done:
            self._servers_with_rows.add(server_id)
        return True

    def _note_silence(self, now_s: float) -> None:
        """Move the servers that have fallen silent."""
        while self._reporting:
            server_id, heard = next(iter(self._reporting.items()))
            if now_s - heard.at_s < SILENT_S:
                return
            del self._reporting[server_id]
            self._silent[server_id] = _Known(heard.stats.at_unix_s, heard.job)
            self._totals.rows_taken += heard.job.rows_done - heard.job.rows_received


_NO_ROWS = JobStats()
