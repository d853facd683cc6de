"""Track the job's progress: take samples of the collector, show a line of each, and check the limits on errors.

This module knows nothing of Spark: it reads the collector and calls back. Samples are what MLflow shows.
``engine_tracks`` keeps the data of single engines, for the charts. Both take a bounded amount of memory.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Self

from pipemax.wire import ServerStats
from pipemax_spark.report.collector import Collector
from pipemax_spark.report.engine_tracks import EngineTracks
from pipemax_spark.report.samples import Sample, engine_means, phases_text
from pipemax_spark.request.error_limits import ErrorLimits
from pipemax_spark.request.prices import Prices

log = logging.getLogger(__name__)

_WINDOW_S = 30.0
"""Time window of the rates."""
_PERIOD_S = 1.0
_MAX_SAMPLES = 4_000
"""Beyond this number every other older sample is dropped: hours stay as readable as minutes, and memory stays flat."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgressLine:
    """Where the line is shown, how often, and in which units."""

    show: Callable[[str], None]
    period_s: float
    prices: Prices = field(default_factory=Prices)
    unit: str = "rows"
    limits_left: Callable[[], str] = str
    """Returns what is left of the run's limits, or no text."""

    def text(self, sample: Sample, *, rows_total: int, servers: Sequence[ServerStats]) -> str:
        """Return the line of a job with ``rows_total`` rows."""
        if sample.rows_done == 0:
            return f"{clock(sample.seconds)}  {_loading(servers)}"
        # A retried task's rows are done twice, but the job has no more rows than its total.
        done = min(sample.rows_done, rows_total)
        parts = [
            f"{clock(sample.seconds)}  {done:,} of {rows_total:,} {self.unit}",
            f"{sample.rows_per_s:,.1f} {self.unit}/s",
            # A pooling task generates none.
            f"{sample.tokens_per_s:,.0f} tokens/s" if sample.completion_tokens else "",
            sample.phases,
            f"{sample.rows_error:,} errors" if sample.rows_error else "",
            _time_left(rows_total - done, sample.rows_per_s),
        ]
        if self.prices.are_known:
            parts.append(f"cost {self.prices.cost(seconds=sample.seconds, spent=sample.spent):,.2f}")
        parts.append(self.limits_left())
        return " · ".join(part for part in parts if part)


class Progress:
    """Takes samples on a separate thread, from entry to exit."""

    def __init__(
        self,
        collector: Collector,
        line: ProgressLine,
        *,
        limits: ErrorLimits,
        stop_job: Callable[[str], None],
    ) -> None:
        """Prepare to take samples; ``stop_job`` gets the reason, once, when a limit is passed."""
        self._collector = collector
        self._line = line
        self._limits = limits
        self._stop_job = stop_job
        self._rows_total = 0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pipemax-progress", daemon=True)
        self._started_s = time.monotonic()
        self._started_unix_s = time.time()
        self._lock = threading.Lock()
        self._samples: list[Sample] = []
        self.tracks = EngineTracks()
        """The samples; complete after the exit, and before that owned by this object's thread."""
        self._first_rows: tuple[float, int] | None = None
        self._is_stopping_job = False

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()
        self.take_sample()

    @property
    def samples(self) -> Sequence[Sample]:
        with self._lock:
            return list(self._samples)

    def expect(self, rows: int) -> None:
        """Add ``rows`` to the rows to be done."""
        with self._lock:
            self._rows_total += rows

    @property
    def rows_total(self) -> int:
        """The rows to be done so far."""
        with self._lock:
            return self._rows_total

    def seconds(self) -> float:
        """Return the seconds since this object was made."""
        return time.monotonic() - self._started_s

    def rows_per_s(self) -> float | None:
        """Return the rate since the first rows were done; None before that, and while it is too short ago to tell."""
        with self._lock:
            if self._first_rows is None or not self._samples:
                return None
            (first_s, first_rows), last = self._first_rows, self._samples[-1]
        span_s = last.seconds - first_s
        return (last.rows_done - first_rows) / span_s if span_s >= 2 * _PERIOD_S else None

    def take_sample(self) -> Sample:
        """Take a sample now and keep it, and each engine's report. Call it on one thread at a time."""
        servers = self._collector.servers()
        for server in servers:
            reported_s = server.at_unix_s - self._started_unix_s
            self.tracks.add(server, self._collector.job_of(server), reported_s=reported_s)
        sample = self._sample(servers)
        self._keep(sample)
        return sample

    def _run(self) -> None:
        next_shown_s = 0.0
        while not self._stopped.wait(_PERIOD_S):
            try:
                sample = self.take_sample()
                if sample.seconds >= next_shown_s:
                    next_shown_s = sample.seconds + self._line.period_s
                    self._line.show(self.line(sample))
                self._check_limits()
            except Exception:  # the rows do not depend on it; without this the line would stop silently
                log.exception("progress could not be shown")

    def line(self, sample: Sample) -> str:
        """Return the line of this sample."""
        return self._line.text(sample, rows_total=self.rows_total, servers=self._collector.servers())

    def _check_limits(self) -> None:
        if self._is_stopping_job:
            return
        totals = self._collector.totals()
        reason = self._limits.reason_to_stop(totals.rows_done, totals.errors_with_examples)
        if reason is not None:
            self._is_stopping_job = True
            self._stop_job(reason)

    def _keep(self, sample: Sample) -> None:
        with self._lock:
            self._samples.append(sample)
            if self._first_rows is None and sample.rows_done:
                self._first_rows = (sample.seconds, sample.rows_done)
            if len(self._samples) > _MAX_SAMPLES:
                # The newest half keeps all of its samples: the rates need them.
                half = len(self._samples) // 2
                self._samples[:half] = self._samples[:half:2]

    def _sample(self, servers: Sequence[ServerStats]) -> Sample:
        now_s = time.monotonic() - self._started_s
        totals = self._collector.totals()
        with self._lock:
            # Do not go back before the first row: while a model loads, nothing can be said about the time left.
            window = (s for s in reversed(self._samples) if s.seconds < now_s - _WINDOW_S or not s.rows_done)
            past = next(window, self._samples[0] if self._samples else None)
        span_s = max(now_s - (past.seconds if past else 0.0), 1e-3)
        return Sample(
            seconds=now_s,
            rows_done=totals.rows_done,
            rows_error=totals.rows_error,
            completion_tokens=totals.completion_tokens,
            spent=totals.spent,
            rows_per_s=(totals.rows_done - (past.rows_done if past else 0)) / span_s,
            tokens_per_s=(totals.completion_tokens - (past.completion_tokens if past else 0)) / span_s,
            running_requests=sum(server.running_requests for server in servers),
            waiting_requests=sum(server.waiting_requests for server in servers),
            kv_usage=max((server.kv_usage for server in servers), default=0.0),
            phases=phases_text(servers),
            engine_means=engine_means(servers),
        )


def _loading(servers: Sequence[ServerStats]) -> str:
    waiting = [
        f"engine {i} of {len(servers)}: {server.detail or server.state}"
        for i, server in enumerate(servers, 1)
        if server.state != "ready"
    ]
    if waiting:
        return "; ".join(waiting)
    return "engines ready, no row done yet" if servers else "starting tasks and engines"


def _time_left(rows: int, rows_per_s: float) -> str:
    if rows == 0:
        return "committing"
    return f"{clock(rows / rows_per_s)} left" if rows_per_s > 0 else "time left unknown"


def clock(seconds: float) -> str:
    """Format seconds as ``m:ss`` or ``h:mm:ss``."""
    hours, rest = divmod(round(seconds), 3600)
    return f"{hours}:{rest // 60:02}:{rest % 60:02}" if hours else f"{rest // 60}:{rest % 60:02}"
