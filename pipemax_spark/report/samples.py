"""A sample of the whole job at one instant: what the line of progress and MLflow show, and its names in MLflow.

MLflow's page makes a section of each prefix. The documentation's page of metrics is made from these tables.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from pipemax.wire import ServerStats, Spent
from pipemax_spark.report.engine_tracks import phase_of

RUN_METRICS: Mapping[str, tuple[str, str]] = {
    "rows_done": ("throughput", "Rows done so far, error rows included."),
    "rows_error": ("throughput", "Error rows so far."),
    "rows_per_s": ("throughput", "Rows per second over the last 30 s."),
    "tokens_per_s": ("throughput", "Generated tokens per second over the last 30 s."),
    "running_requests": ("throughput", "Requests that the engines run now."),
    "waiting_requests": ("throughput", "Requests that wait in the engines."),
    "kv_usage": ("kv", "Share of GPU KV in use, of the engine with the highest."),
    "host_kv_usage": ("kv", "Share of the host's KV pool that is reserved."),
    "budget_bytes": ("kv", "Bytes that the next step may prefetch."),
    "prefetched_bytes": ("kv", "Bytes prefetched since the engine's start."),
    "evictions": ("kv", "Requests that have left the GPU since the engine's start."),
    "preemptions": ("kv", "Requests that stock vLLM has preempted since the engine's start."),
    "prefix_cache_hit_rate": ("kv", "Share of prompt tokens found in the engine's prefix cache."),
    "batch_size": ("steps", "Requests in the last step."),
    "predicted_step_s": ("steps", "Predicted seconds of the step that was timed last."),
    "measured_step_s": ("steps", "Measured seconds of that step, on its slowest stage."),
    "prefetch_stall_s": ("steps", "Seconds for which steps have waited for prefetches."),
    "phase_switches": ("steps", "Switches between prefill and decode."),
}
"""Metrics over time → group, and what it is. Figures of engines are means over the engines."""


SAMPLE_METRICS = (
    *("rows_done", "rows_error", "rows_per_s", "tokens_per_s"),
    *("running_requests", "waiting_requests", "kv_usage"),
)
"""The metrics that are fields of ``Sample``."""
SHOWN_METRICS = tuple(name for name in RUN_METRICS if name not in SAMPLE_METRICS)
"""The engines' figures that MLflow shows; the run's Parquet file has all of them."""


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
    spent: Spent = field(default_factory=Spent)
    """What an endpoint was asked so far."""


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


def run_metric(name: str) -> str:
    """Return the name in MLflow of a metric over time."""
    group, _ = RUN_METRICS[name]
    return f"{group}/{name}"


def total_metric(name: str) -> str:
    """Return the name in MLflow of a total that is known when the run has ended."""
    return f"time/{name.removeprefix('time_')}" if name.startswith("time_") else f"total/{name}"
