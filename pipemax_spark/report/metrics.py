"""Serve a run's figures to Prometheus, from the driver.

They are read when Prometheus asks, from the engines' reports to the collector. Names and units follow Prometheus'
rules, and vLLM's where vLLM has the figure. They hold counts, the run's id, the output's name and hosts; no row.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from pipemax_spark.errors import JobError
from pipemax_spark.report.collector import Collector
from pipemax_spark.report.progress import Progress

if TYPE_CHECKING:
    from prometheus_client import Metric

_COUNTS = {
    "pipemax_rows": "Rows that engines have ended, error rows among them; with --ask, answers",
    "pipemax_rows_reused": "Rows of these that took the answer of an equal request",
    "pipemax_rows_committed": "Rows that are in the output",
    "pipemax_prompt_tokens": "Prompt tokens of ended rows",
    "pipemax_generation_tokens": "Output tokens of ended rows",
    "pipemax_endpoint_requests": "Requests to an endpoint, retries among them",
    "pipemax_endpoint_retries": "Retries among these requests",
    "pipemax_endpoint_prompt_tokens": "Prompt tokens that an endpoint says it has used",
    "pipemax_endpoint_generation_tokens": "Output tokens that an endpoint says it has used",
}
_GAUGES = {
    "pipemax_rows_left": "Rows that engines have not ended yet; with --ask, answers",
    "pipemax_run_seconds": "Seconds since the run's first rows were looked for",
}


class RunMetrics:
    """The figures of one run, as prometheus_client's registry collects them."""

    def __init__(
        self,
        collector: Collector,
        progress: Progress,
        committed_rows: Callable[[], int],
        *,
        run_id: str,
        output: str,
    ) -> None:
        self._collector = collector
        self._progress = progress
        self._committed_rows = committed_rows
        self._labels = {"run_id": run_id, "output": output}

    def collect(self) -> "Iterator[Metric]":
        """Yield each metric with its values as of now."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        totals, servers = self._collector.totals(), self._collector.servers()
        names, values = list(self._labels), list(self._labels.values())
        figures = {
            "pipemax_rows": totals.rows_done,
            "pipemax_rows_reused": totals.rows_reused,
            "pipemax_rows_committed": self._committed_rows(),
            "pipemax_prompt_tokens": totals.prompt_tokens,
            "pipemax_generation_tokens": totals.completion_tokens,
            "pipemax_endpoint_requests": totals.spent.requests,
            "pipemax_endpoint_retries": totals.spent.retries,
            "pipemax_endpoint_prompt_tokens": totals.spent.prompt_tokens,
            "pipemax_endpoint_generation_tokens": totals.spent.output_tokens,
            "pipemax_rows_left": max(0, self._progress.rows_total - totals.rows_done),
            "pipemax_run_seconds": self._progress.seconds(),
        }
        for kind, texts in ((CounterMetricFamily, _COUNTS), (GaugeMetricFamily, _GAUGES)):
            for name, text in texts.items():
                metric = kind(name, text, labels=names)
                metric.add_metric(values, figures[name])
                yield metric
        errors = CounterMetricFamily("pipemax_rows_error", "Error rows, by code", labels=[*names, "code"])
        for code, rows in totals.errors.items():
            errors.add_metric([*values, code], rows)
        yield errors
        engines = GaugeMetricFamily(
            "pipemax_engines", "Engine servers that report, by state", labels=[*names, "state"]
        )
        for state, count in Counter(server.state for server in servers).items():
            engines.add_metric([*values, state], count)
        yield engines
        places = GaugeMetricFamily(
            "pipemax_engine_metrics_port", "Port of an engine's metrics", labels=[*names, "host", "server_id"]
        )
        for server in servers:
            if server.metrics_port is not None:
                places.add_metric([*values, server.host, server.server_id], server.metrics_port)
        yield places


@contextmanager
def served(metrics: RunMetrics, *, port: int, hosts: Sequence[str]) -> Iterator[int]:
    """Serve the metrics at the first of ``hosts`` that can be bound, until the context ends; yield the port.

    A ``port`` of 0 takes a free one. Raise ``JobError`` if no host has the port, or prometheus-client is missing.
    """
    try:
        from prometheus_client import CollectorRegistry, start_http_server
    except ImportError:
        raise JobError(
            "--metrics-port needs prometheus-client, which is not installed here: pip install "
            "'pipemax-spark[metrics]'"
        ) from None
    registry = CollectorRegistry(auto_describe=False)
    registry.register(metrics)
    failures = []
    for host in dict.fromkeys(hosts):
        try:
            server, thread = start_http_server(port, host, registry)
        except OSError as error:
            failures.append(f"{host}: {error}")
            continue
        try:
            yield server.server_port
        finally:
            server.shutdown()
            server.server_close()
            thread.join()
        return
    raise JobError(
        f"the driver cannot serve metrics at --metrics-port {port}: {'; '.join(failures)}; give another port"
    )
