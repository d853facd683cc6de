"""Serve an engine server's figures to Prometheus, once a job's engine config asks for it.

The names are vLLM's, with ``pipemax_engine_`` in front. They hold counts, the runs' ids and error codes, and no row.
"""

import logging
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from pipemax.wire import JobStats, ServerStats

if TYPE_CHECKING:
    from prometheus_client import Metric

log = logging.getLogger(__name__)

_ALL_ADDRESSES = "0.0.0.0"
_OF_RUNS: dict[str, tuple[str, Callable[[JobStats], float]]] = {
    "rows": ("Rows that ended, error rows among them", lambda job: job.rows_done),
    "rows_reused": ("Rows of these that took the answer of an equal request", lambda job: job.rows_reused),
    "prompt_tokens": ("Prompt tokens of ended rows", lambda job: job.prompt_tokens),
    "generation_tokens": ("Output tokens of ended rows", lambda job: job.completion_tokens),
    "endpoint_requests": ("Requests to an endpoint, retries among them", lambda job: job.spent.requests),
    "endpoint_retries": ("Retries among these requests", lambda job: job.spent.retries),
    "endpoint_prompt_tokens": (
        "Prompt tokens that an endpoint says it has used",
        lambda job: job.spent.prompt_tokens,
    ),
    "endpoint_generation_tokens": (
        "Output tokens that an endpoint says it has used",
        lambda job: job.spent.output_tokens,
    ),
}
_COUNTS: dict[str, tuple[str, Callable[[ServerStats], float]]] = {
    "starts": ("Engines that have been loaded", lambda stats: stats.engine_starts),
    "num_preemptions": ("Preemptions since the engine's start", lambda stats: _figure(stats, "preemptions")),
    "prefix_cache_hits": (
        "Prompt tokens found in the KV cache since the engine's start",
        lambda stats: _figure(stats, "prefix_cache_hit_tokens"),
    ),
}
_GAUGES: dict[str, tuple[str, Callable[[ServerStats], float]]] = {
    "num_requests_running": ("Requests in the running batch", lambda stats: stats.running_requests),
    "num_requests_waiting": ("Requests that wait for room", lambda stats: stats.waiting_requests),
    "kv_cache_usage_perc": ("Share of the GPU's KV blocks in use, 0 to 1", lambda stats: stats.kv_usage),
    "open_sessions": ("Tasks that use the server", lambda stats: stats.open_sessions),
}


def _figure(stats: ServerStats, name: str) -> float:
    return stats.engine_metrics.get(name, 0.0)


class EngineMetrics:
    """The figures of one server, as prometheus_client's registry collects them."""

    def __init__(self, stats: Callable[[], ServerStats]) -> None:
        self._stats = stats

    def collect(self) -> "Iterator[Metric]":
        """Yield each metric with its values as of now."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        stats = self._stats()
        for name, (text, of_job) in _OF_RUNS.items():
            metric = CounterMetricFamily(f"pipemax_engine_{name}", text, labels=["run_id"])
            for run_id, job in stats.jobs.items():
                metric.add_metric([run_id], of_job(job))
            yield metric
        errors = CounterMetricFamily("pipemax_engine_rows_error", "Error rows", labels=["run_id", "code"])
        for run_id, job in stats.jobs.items():
            for code, rows in job.errors.items():
                errors.add_metric([run_id, code], rows)
        yield errors
        for name, (text, of_server) in _COUNTS.items():
            yield CounterMetricFamily(f"pipemax_engine_{name}", text, value=of_server(stats))
        for name, (text, of_server) in _GAUGES.items():
            yield GaugeMetricFamily(f"pipemax_engine_{name}", text, value=of_server(stats))
        state = GaugeMetricFamily("pipemax_engine_state", "1 for the server's state", labels=["state"])
        state.add_metric([stats.state], 1)
        yield state


class MetricsEndpoint:
    """Serves the figures from the first call of ``serve`` to ``close``. Thread-safe."""

    def __init__(self, stats: Callable[[], ServerStats]) -> None:
        self._metrics = EngineMetrics(stats)
        self._lock = threading.Lock()
        self._server: Any = None
        self.port: int | None = None
        """Where it serves; None while it does not."""

    def serve(self, port: int) -> None:
        """Serve at this port, or at a free one if that is 0 or taken, as by another server of the machine.

        No row depends on it: what goes wrong is logged.
        """
        with self._lock:
            if self._server is not None:
                return
            try:
                self._server, self.port = _listen(self._metrics, port)
            except (ImportError, OSError) as error:
                log.warning("no metrics are served: %s", error)
                return
        log.info("metrics are served at port %d", self.port)

    def close(self) -> None:
        with self._lock:
            server, self._server, self.port = self._server, None, None
        if server is not None:
            server.shutdown()
            server.server_close()


def _listen(metrics: EngineMetrics, port: int) -> tuple[Any, int]:
    from prometheus_client import CollectorRegistry, start_http_server

    registry = CollectorRegistry(auto_describe=False)
    registry.register(metrics)
    try:
        server, _ = start_http_server(port, _ALL_ADDRESSES, registry)
    except OSError as error:
        if not port:
            raise
        log.warning("metrics_port %d: %s; a free port is taken", port, error)
        server, _ = start_http_server(0, _ALL_ADDRESSES, registry)
    return server, server.server_port
