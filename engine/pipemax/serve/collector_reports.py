"""Send reports to the driver's collectors: every second, and once more when a job's last session ends.

A collector with many servers requests fewer reports; a session's last report is always sent.

A collector that cannot be reached costs one warning and little time: the longer it fails, the less often it is tried.
The driver may only have been busy for a few seconds, so a session's last report is tried anyway.
"""

import logging
import threading
import time
from collections.abc import Callable

import pyarrow as pa
from pyarrow import flight

from pipemax.wire import COLLECTOR_ACTION_STATS, CollectorAddress, JobOutlook, ServerStats

log = logging.getLogger(__name__)

_FIRST_RETRY_S = 1.0
_LONGEST_RETRY_S = 30.0
"""Each failure in a row doubles the wait before the next attempt, up to this. From then on a session's last report
waits for the next attempt like any other."""


class Reporter:
    """Pushes ``ServerStats`` to collectors. Thread-safe."""

    def __init__(
        self,
        collectors: Callable[[], set[CollectorAddress]],
        stats_for: Callable[[CollectorAddress], ServerStats],
        hear: Callable[[JobOutlook], None],
        *,
        period_s: float,
        timeout_s: float,
    ) -> None:
        """Call ``hear`` with the collectors' answers."""
        self._timeout_s = timeout_s
        self._hear = hear
        self._collectors = collectors
        self._stats_for = stats_for
        self._period_s = period_s
        self._lock = threading.Lock()
        self._links: dict[CollectorAddress, _Link] = {}
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="reports", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()

    def report_now(self, collector: CollectorAddress, *, is_last: bool = False) -> None:
        """Send the current totals and wait until the collector has them, or cannot be reached.

        With ``is_last`` no report may follow, so a collector that failed recently is tried anyway.
        """
        with self._lock:
            link = self._links.setdefault(collector, _Link(collector, self._timeout_s))
        outlook = link.send(self._stats_for, is_last=is_last)
        if outlook is not None:
            self._hear(outlook)

    def _run(self) -> None:
        while not self._stopped.wait(self._period_s):
            wanted = self._collectors()
            for collector in wanted:
                self.report_now(collector)
            with self._lock:
                unused = [self._links[collector] for collector in set(self._links) - wanted]
            for link in unused:
                # Keep it: its job's next task must neither warn about it again nor wait for it as for a new collector.
                link.close()


class _Link:
    """The connection to one collector."""

    def __init__(self, collector: CollectorAddress, timeout_s: float) -> None:
        self._collector = collector
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._client: flight.FlightClient | None = None
        self._warned = False
        self._retry_s = _FIRST_RETRY_S
        """The time to wait after the next failure."""
        self._not_before_s = float("-inf")

    def send(
        self, stats_for: Callable[[CollectorAddress], ServerStats], *, is_last: bool
    ) -> JobOutlook | None:
        """Send the statistics. Return the collector's answer, or ``None`` if it was not reached or says nothing."""
        # The snapshot is taken under the lock: an older one must never arrive after a newer one.
        with self._lock:
            insists = is_last and self._retry_s < _LONGEST_RETRY_S
            if time.monotonic() < self._not_before_s and not insists:
                return None
            try:
                answer = self._push(stats_for(self._collector))
                self._retry_s = _FIRST_RETRY_S
                if answer is not None:
                    self._not_before_s = time.monotonic() + answer.report_after_s
                return answer
            except (flight.FlightError, pa.ArrowException, OSError) as error:
                self._not_before_s = time.monotonic() + self._retry_s
                self._retry_s = min(_LONGEST_RETRY_S, 2 * self._retry_s)
                if not self._warned:
                    self._warned = True
                    log.warning(
                        "the collector at %s:%d cannot be reached, the job goes on without progress reports: %s",
                        self._collector.host,
                        self._collector.port,
                        str(error).partition("\n")[0],
                    )
        return None

    def close(self) -> None:
        with self._lock:
            if self._client is not None:
                self._client.close()
                self._client = None

    def _push(self, stats: ServerStats) -> JobOutlook | None:
        if self._client is None:
            self._client = flight.FlightClient(
                f"grpc+tcp://{self._collector.host}:{self._collector.port}",
                # The driver is never behind the web proxy that the environment may name.
                generic_options=[("grpc.enable_http_proxy", 0)],
            )
        options = flight.FlightCallOptions(
            timeout=self._timeout_s, headers=[(b"authorization", f"Bearer {self._collector.token}".encode())]
        )
        answers = list(
            self._client.do_action(flight.Action(COLLECTOR_ACTION_STATS, stats.to_bytes()), options)
        )
        return JobOutlook.from_bytes(answers[0].body.to_pybytes()) if answers else None
