"""Name the metrics of a run in MLflow, in groups: its page makes a section of each prefix.

The documentation's page of metrics is made from these tables.
"""

from collections.abc import Mapping

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


def run_metric(name: str) -> str:
    """Return the name in MLflow of a metric over time."""
    group, _ = RUN_METRICS[name]
    return f"{group}/{name}"


def total_metric(name: str) -> str:
    """Return the name in MLflow of a total that is known when the run has ended."""
    return f"time/{name.removeprefix('time_')}" if name.startswith("time_") else f"total/{name}"
