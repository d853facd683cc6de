"""The figures that an engine server gives Prometheus: its rows and tokens, its requests, and no row's text."""

import urllib.request

from prometheus_client.parser import text_string_to_metric_families

from pipemax.serve.metrics import MetricsEndpoint
from pipemax.wire import ServerStats
from tests.serve.support import options, run_prompts, server_stats


def scraped(port: int) -> tuple[str, dict[str, dict[tuple[str, ...], float]]]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    values: dict[str, dict[tuple[str, ...], float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            values.setdefault(sample.name, {})[
                tuple(sample.labels[name] for name in sorted(sample.labels))
            ] = sample.value
    return text, values


def test_a_server_serves_its_figures_where_the_engine_config_names_a_port(shared_engine_python: str) -> None:
    opts = options(shared_engine_python, job_id="watched")
    opts.engine["metrics_port"] = 0
    run_prompts(["canary one", "two", "", "[[error]] canary"], opts)
    port = server_stats(opts).metrics_port
    assert port is not None
    text, values = scraped(port)
    assert values["pipemax_engine_rows_total"][("watched",)] == 4
    assert values["pipemax_engine_rows_error_total"][("empty_prompt", "watched")] == 1
    assert values["pipemax_engine_prompt_tokens_total"][("watched",)] == 3
    assert values["pipemax_engine_generation_tokens_total"][("watched",)] > 0
    assert values["pipemax_engine_num_requests_running"] == {(): 0}
    assert values["pipemax_engine_state"] == {("ready",): 1}
    assert "canary" not in text


def test_servers_of_one_machine_take_ports_of_their_own() -> None:
    def stats() -> ServerStats:
        return ServerStats(server_id="s", host="h", pid=1, at_unix_s=1.0, state="ready")

    first, second = MetricsEndpoint(stats), MetricsEndpoint(stats)
    try:
        first.serve(0)
        first.serve(0)
        assert first.port is not None
        second.serve(first.port)
        assert second.port not in (None, first.port)
        for endpoint in (first, second):
            assert endpoint.port is not None
            assert scraped(endpoint.port)[1]["pipemax_engine_state"] == {("ready",): 1}
    finally:
        first.close()
        second.close()
    assert first.port is None
