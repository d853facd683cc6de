"""A sample of the whole job at one instant: what the line of progress and MLflow show."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from pipemax.wire import ServerStats
from pipemax_spark.report.engine_tracks import phase_of
from pipemax_spark.report.metric_names import SHOWN_METRICS


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """The job at one instant."""

    seconds: float
    """Since the job's first chunk was started."""
    rows_done: int
    rows_error: int
    completion_tokens: int
    rows_per_s: float
    """Over the last 30 s, like ``tokens_per_s``."""
    tokens_per_s: float
    """Generated tokens."""
    running_requests: int
    """In all engines, like ``waiting_requests``."""
    waiting_requests: int
    kv_usage: float
    """KV usage of the engine with the highest."""
    phases: str
    """The engines' phases, such as ``decode``, or ``2 decode, 1 prefill``."""
    engine_means: Mapping[str, float]
    """Means of ``SHOWN_METRICS`` over the engines that report them."""


def in_rows(sample: Sample, *, requests_per_row: int) -> Sample:
    """Return a sample of requests as one of rows."""
    rows_done = sample.rows_done // requests_per_row
    return replace(
        sample,
        rows_done=rows_done,
        rows_error=sample.rows_error if requests_per_row == 1 else min(sample.rows_error, rows_done),
        rows_per_s=sample.rows_per_s / requests_per_row,
    )


def phases_text(servers: Sequence[ServerStats]) -> str:
    """Return the engines' phases in words."""
    phases = Counter(phase_of(server) for server in servers)
    return next(iter(phases)) if len(phases) == 1 else ", ".join(f"{n} {name}" for name, n in phases.items())


def engine_means(servers: Sequence[ServerStats]) -> dict[str, float]:
    """Return means of ``SHOWN_METRICS`` over the engines that report them."""
    values_by_name = {
        name: [server.engine_metrics[name] for server in servers if name in server.engine_metrics]
        for name in SHOWN_METRICS
    }
    return {name: sum(values) / len(values) for name, values in values_by_name.items() if values}
