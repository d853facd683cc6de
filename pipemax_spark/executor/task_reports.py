"""Report error rows that a task itself finds to the driver's collector, while the task runs.

Engine servers report the errors that they see; this module finds outputs that do not parse, after them. Without these
reports the driver would learn of such rows only when a chunk has been committed, too late for an error-rate limit.
Reports are a convenience: a task that cannot reach the collector stops reporting, and only the table counts.
"""

import logging
import time
import uuid
from collections import Counter
from typing import Self

import pyarrow as pa
from pyarrow import flight

from pipemax.wire import COLLECTOR_ACTION_STATS, CollectorAddress, JobOutlook, JobStats, ServerStats

log = logging.getLogger(__name__)

TASK_STATE = "task"
"""``ServerStats.state`` of these reports: they come from a task, not from an engine server."""
TASK_ENDED_STATE = "task_ended"
"""``ServerStats.state`` of a task's last report. No other report of this task may count after it."""
_PERIOD_S = 2.0
_TIMEOUT_S = 2.0


def is_from_task(stats: ServerStats) -> bool:
    """Tell whether a task sent this report; all others come from engine servers."""
    return stats.state in (TASK_STATE, TASK_ENDED_STATE)


class TaskReporter:
    """Sends a report at most once a period, and a last one at exit if there was any. Used by one thread.

    A collector with many reporting tasks requests fewer reports.
    """

    def __init__(
        self, collector: CollectorAddress | None, job_id: str, *, period_s: float = _PERIOD_S
    ) -> None:
        self._period_s = period_s
        self._collector = collector
        self._job_id = job_id
        self._reporter_id = f"task:{uuid.uuid4().hex}"
        self._errors: Counter[str] = Counter()
        self._examples: dict[str, str] = {}
        self._has_news = False
        self._not_before_s = 0.0
        self._client: flight.FlightClient | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._errors:
            self._report(TASK_ENDED_STATE)
        if self._client is not None:
            self._client.close()

    def count(self, errors: Counter[tuple[str, str]]) -> None:
        """Count these errors, (code, message) → rows, and report them if the last report is old enough."""
        for (code, message), rows in errors.items():
            self._errors[code] += rows
            self._examples.setdefault(code, message)
            self._has_news = True
        if self._has_news and time.monotonic() >= self._not_before_s:
            self._not_before_s = time.monotonic() + self._period_s
            self._report(TASK_STATE)

    def _report(self, state: str) -> None:
        collector = self._collector
        if collector is None:
            return
        self._has_news = False
        stats = ServerStats(
            server_id=self._reporter_id,
            host="",
            pid=0,
            at_unix_s=time.time(),
            state=state,
            jobs={self._job_id: JobStats(errors=dict(self._errors), error_examples=self._examples)},
        )
        options = flight.FlightCallOptions(
            timeout=_TIMEOUT_S, headers=[(b"authorization", f"Bearer {collector.token}".encode())]
        )
        try:
            if self._client is None:
                self._client = flight.FlightClient(
                    f"grpc+tcp://{collector.host}:{collector.port}",
                    # The driver is never behind the web proxy that the environment may name.
                    generic_options=[("grpc.enable_http_proxy", 0)],
                )
            action = flight.Action(COLLECTOR_ACTION_STATS, stats.to_bytes())
            for answer in self._client.do_action(action, options):
                wait_s = JobOutlook.from_bytes(answer.body.to_pybytes()).report_after_s
                self._not_before_s = max(self._not_before_s, time.monotonic() + wait_s)
        except (flight.FlightError, pa.ArrowException, OSError) as error:
            log.warning("the collector cannot be reached, and this task stops reporting to it: %s", error)
            self._collector = None
