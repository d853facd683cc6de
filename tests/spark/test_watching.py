"""What others see of a job while it runs and when it ends: Prometheus, and a URL that is told of it."""

import socket
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from pipemax_spark.errors import JobError, TooManyErrorsError
from pipemax_spark.request.expected_rows import ExpectedRows
from tests.fakes.settings import fake_config
from tests.fakes.web_server import web_server
from tests.spark.conftest import Jobs, words


def scraped(url: str) -> dict[str, dict[tuple[str, ...], float]]:
    """Each metric's values by the values of its labels that are not the run's."""
    with urllib.request.urlopen(url, timeout=10) as answer:
        text = answer.read().decode()
    values: dict[str, dict[tuple[str, ...], float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            others = tuple(value for name, value in sample.labels.items() if name not in ("run_id", "output"))
            values.setdefault(sample.name, {})[others] = sample.value
    return values


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.mark.long
def test_prometheus_sees_a_job_while_it_runs(run: Jobs, tmp_path: Path) -> None:
    run.write_input([*words(0, 40), (40, "[[error]]")])
    held, port = tmp_path / "held", free_port()
    held.touch()
    seen: list[dict[str, Any]] = []

    def look() -> None:
        deadline_s = time.monotonic() + 120
        while time.monotonic() < deadline_s:
            try:
                figures = scraped(f"http://127.0.0.1:{port}/metrics")
            except OSError:
                figures = {}
            if figures.get("pipemax_rows_total", {}).get((), 0) and "pipemax_rows_error_total" in figures:
                seen.append(figures)
                break
            time.sleep(0.2)
        held.unlink()

    watching = threading.Thread(target=look)
    watching.start()
    run.run(
        metrics_port=port,
        engine=fake_config(model="watched", held_by=str(held), held_row_s=0.2, max_num_seqs=64),
    )
    watching.join()
    [figures] = seen
    done = figures["pipemax_rows_total"][()]
    assert 0 < done <= 41
    assert figures["pipemax_rows_left"][()] == 41 - done
    assert figures["pipemax_rows_error_total"] == {("engine_error",): 1}
    assert figures["pipemax_engines"] == {("ready",): 1}
    assert figures["pipemax_prompt_tokens_total"][()] > 0
    assert figures["pipemax_run_seconds"][()] > 0
    assert f"Metrics  http://127.0.0.1:{port}/metrics" in run.printed
    with pytest.raises(OSError, match="refused"):
        scraped(f"http://127.0.0.1:{port}/metrics")


def test_a_metrics_port_that_is_taken_is_refused(run: Jobs) -> None:
    run.write_input(words(0, 3))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(JobError, match=f"cannot serve metrics at --metrics-port {port}"):
            run.run(metrics_port=port)


@pytest.mark.long  # posts are units
def test_a_url_is_told_of_the_start_and_of_each_kind_of_end(run: Jobs) -> None:
    run.write_input(words(0, 20))
    with web_server() as posts:
        run.run(notify=posts.url, limit=12)
        run.run(notify=posts.url)
        run.run(notify=posts.url)
        with pytest.raises(JobError):
            run.run(notify=posts.url, expect_rows=ExpectedRows.of("30:"))
        run.write_input([*words(0, 20), *((i, f"[[error]] canary {i}") for i in range(20, 60))])
        with pytest.raises(TooManyErrorsError):
            run.run(notify=posts.url)
        run.dry_run(notify=posts.url)
    told = [
        (body["event"], body["rows"], body["rows_left"], body["errors"], body["ended_by"], body["complete"])
        for body in posts.bodies
    ]
    assert sorted(told[:2]) == [("end", 12, 8, 0, "limit", False), ("start", 0, 20, 0, None, False)]
    assert sorted(told[2:4]) == [("end", 8, 0, 0, "done", True), ("start", 0, 8, 0, None, False)]
    assert told[4:6] == [("end", 0, 0, 0, "done", True), ("end", 0, None, 0, "row_count", False)]
    assert sorted(told[6:]) == [("end", 40, 0, 40, "error_rows", True), ("start", 0, 40, 0, None, False)]
    assert all(body["output"] == f"{run.output}" or run.output in body["output"] for body in posts.bodies)
    assert not any(b"canary" in text or b"word" in text for text in posts.texts), "no row's text"


def test_a_url_that_refuses_costs_a_job_one_warning(run: Jobs) -> None:
    run.write_input(words(0, 3))
    with web_server() as posts:
        url = posts.url
    summary = run.run(notify=url)
    assert summary.rows_out == 3
    assert run.printed.count("--notify: 127.0.0.1 could not be told of this run") == 1
    assert "secret-path" not in run.printed
