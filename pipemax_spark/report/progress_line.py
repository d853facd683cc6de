"""The line of progress: rows, rates, phase, errors, time left and cost; or what the engines are loading."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pipemax.wire import ServerStats
from pipemax_spark.report.samples import Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgressLine:
    """Where the line is shown, how often, and in which units."""

    show: Callable[[str], None]
    period_s: float
    price_per_hour: float | None = None
    unit: str = "rows"

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
        if self.price_per_hour is not None:
            parts.append(f"cost {sample.seconds / 3600 * self.price_per_hour:.2f}")
        return " · ".join(part for part in parts if part)


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
