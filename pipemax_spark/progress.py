"""How far the job is: samples of the collector, one line for people, and the check of the error rate."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from pipemax_spark.collector import Collector, Totals

_WINDOW_S = 30.0
"""Rates are over so much of the past."""
_PERIOD_S = 1.0
_MIN_ROWS_FOR_ERROR_RATE = 1_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One instant of a job; what the plot and MLflow show."""

    seconds: float
    rows_done: int
    rows_error: int
    tokens: int
    rows_per_s: float
    tokens_per_s: float
    running_requests: int
    waiting_requests: int
    kv_usage: float
    phase: str
    engines: int


class Progress:
    """Samples on a thread of its own, from entry to exit."""

    def __init__(
        self,
        collector: Collector,
        *,
        rows_total: int,
        max_error_rate: float,
        cancel: Callable[[str], None],
        show: Callable[[str], None],
        show_period_s: float,
        price_per_hour: float | None = None,
    ) -> None:
        self._collector = collector
        self._rows_total = rows_total
        self._max_error_rate = max_error_rate
        self._cancel = cancel
        self._show = show
        self._show_period_s = show_period_s
        self._price_per_hour = price_per_hour
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pipemax-progress", daemon=True)
        self._started_s = time.monotonic()
        self.samples: list[Sample] = []

    def __enter__(self) -> "Progress":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()
        self.samples.append(self._sample())

    def rows_per_s(self) -> float | None:
        """The present rate; None before the first rows."""
        samples = self.samples
        return samples[-1].rows_per_s if samples and samples[-1].rows_per_s > 0 else None

    def _run(self) -> None:
        shown_s = -self._show_period_s
        while not self._stopped.wait(_PERIOD_S):
            sample = self._sample()
            self.samples.append(sample)
            if sample.seconds - shown_s >= self._show_period_s:
                shown_s = sample.seconds
                self._show(self.line(sample))
            self._check_error_rate(self._collector.totals())

    def _sample(self) -> Sample:
        now_s = time.monotonic() - self._started_s
        totals, servers = self._collector.totals(), self._collector.servers()
        past = next((s for s in self.samples if s.seconds >= now_s - _WINDOW_S), None)
        span_s = now_s - past.seconds if past else now_s
        phases = sorted({server.phase for server in servers if server.phase != "idle"})
        return Sample(
            seconds=now_s,
            rows_done=totals.rows_done,
            rows_error=totals.rows_error,
            tokens=totals.tokens,
            rows_per_s=(totals.rows_done - (past.rows_done if past else 0)) / max(span_s, 1e-3),
            tokens_per_s=(totals.tokens - (past.tokens if past else 0)) / max(span_s, 1e-3),
            running_requests=sum(server.running_requests for server in servers),
            waiting_requests=sum(server.waiting_requests for server in servers),
            kv_usage=max((server.kv_usage for server in servers), default=0.0),
            phase="+".join(phases) or "idle",
            engines=len(servers),
        )

    def line(self, sample: Sample) -> str:
        """Rows, rates, phase, errors, time left; or what the engines are loading."""
        if sample.rows_done == 0:
            servers = self._collector.servers()
            details = sorted({server.detail for server in servers if server.detail})
            waiting_for = "the first rows" if servers else "tasks and engines to start"
            return f"{_clock(sample.seconds)}  {'; '.join(details) or f'waiting for {waiting_for}'}"
        left = self._rows_total - sample.rows_done
        eta = _clock(left / sample.rows_per_s) if sample.rows_per_s > 0 else "unknown"
        parts = [
            f"{_clock(sample.seconds)}  {sample.rows_done:,} of {self._rows_total:,} rows",
            f"{sample.rows_per_s:,.1f} rows/s",
            f"{sample.tokens_per_s:,.0f} tokens/s",
            sample.phase,
            f"{left and eta} left" if left else "committing",
        ]
        if sample.rows_error:
            parts.append(f"{sample.rows_error:,} errors")
        if self._price_per_hour is not None:
            parts.append(f"cost {sample.seconds / 3600 * self._price_per_hour:.2f}")
        return " · ".join(parts)

    def _check_error_rate(self, totals: Totals) -> None:
        if (
            totals.rows_done < _MIN_ROWS_FOR_ERROR_RATE
            or totals.rows_error <= self._max_error_rate * totals.rows_done
        ):
            return
        self._stopped.set()
        most = sorted(totals.errors.items(), key=lambda item: -item[1])[:3]
        causes = "; ".join(
            f"{code}: {count:,} rows, such as: {totals.error_examples.get(code, '')}" for code, count in most
        )
        self._cancel(
            f"{totals.rows_error:,} of {totals.rows_done:,} rows failed, more than --max-error-rate "
            f"{self._max_error_rate} allows. {causes}"
        )


def _clock(seconds: float) -> str:
    hours, rest = divmod(round(seconds), 3600)
    return f"{hours}:{rest // 60:02}:{rest % 60:02}" if hours else f"{rest // 60}:{rest % 60:02}"
