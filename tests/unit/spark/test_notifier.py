"""What is posted about a run, and that a URL which fails costs the run one warning."""

import threading
import time
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from pipemax_spark.errors import JobError
from pipemax_spark.job.arguments import job_options
from pipemax_spark.job.job import JobCall
from pipemax_spark.job.record import EndRecord
from pipemax_spark.job.run import Run
from pipemax_spark.report.notifier import Notifier
from pipemax_spark.request.urls import check_url
from tests.fakes.web_server import Posts, web_server

END = {"rows": 4, "rows_left": 1, "errors": 2, "ended_by": "limit", "complete": False}


def notifier(url: str | None, warnings: list[str], *, try_s: float = 5.0) -> Notifier:
    return Notifier(url, run_id="run-1", output="out", warn=warnings.append, try_s=try_s, pause_s=0.0)


def status(code: int, **headers: str) -> object:
    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(code)
        for name, value in headers.items():
            handler.send_header(name, value)
        handler.end_headers()

    return answer


def test_each_event_is_posted_as_json_with_the_run_s_figures() -> None:
    warnings: list[str] = []
    with web_server() as posts:
        told = notifier(posts.url, warnings)
        told.start(rows_left=5)
        told.budget(rows=3, rows_left=2, errors=1)
        told.end(**END)
    events = {body.pop("event"): body for body in posts.bodies}
    assert all(body.pop("seconds") >= 0 for body in events.values())
    names = {"run_id": "run-1", "output": "out"}
    assert events == {
        "start": {**names, "rows": 0, "rows_left": 5, "errors": 0, "ended_by": None, "complete": False},
        "budget": {**names, "rows": 3, "rows_left": 2, "errors": 1, "ended_by": None, "complete": False},
        "end": {**names, **END},
    }
    assert warnings == []


def test_a_refused_post_is_tried_three_times_and_then_one_warning_names_only_the_host() -> None:
    warnings: list[str] = []
    with web_server(status(503)) as posts:
        told = notifier(posts.url, warnings)
        told.start(rows_left=5)
        told.end(**END)
    assert sorted(body["event"] for body in posts.bodies) == ["end"] * 3 + ["start"] * 3
    assert warnings == [
        "--notify: 127.0.0.1 could not be told of this run (status 503); the run does not depend on it"
    ]


def test_a_post_that_succeeds_at_the_second_try_is_not_repeated() -> None:
    warnings: list[str] = []
    statuses = iter([500, 200])
    with web_server(lambda handler: status(next(statuses))(handler)) as posts:
        notifier(posts.url, warnings).end(**END)
    assert len(posts.bodies) == 2
    assert warnings == []


def test_a_server_that_hangs_is_left_after_three_tries() -> None:
    warnings: list[str] = []
    released = threading.Event()
    with web_server(lambda handler: released.wait(60)) as posts:
        began_s = time.monotonic()
        notifier(posts.url, warnings, try_s=0.3).end(**END)
        waited_s = time.monotonic() - began_s
        released.set()
    assert waited_s < 30
    assert len(warnings) == 1
    assert "no answer" in warnings[0]


def test_a_server_that_answers_byte_by_byte_does_not_hold_up_the_end() -> None:
    warnings: list[str] = []
    released = threading.Event()

    def drip(handler: BaseHTTPRequestHandler) -> None:
        while not released.wait(0.1):
            handler.wfile.write(b"HTTP/1.1 200 OK\r\nA: b\r\n"[:1])

    with web_server(drip) as posts:
        notifier(posts.url, warnings, try_s=0.3).end(**END)
        released.set()
    assert len(warnings) == 1


def test_a_redirect_is_not_followed() -> None:
    warnings: list[str] = []
    with web_server() as other, web_server(status(307, Location=other.url)) as posts:
        notifier(posts.url, warnings).end(**END)
    assert other.bodies == []
    assert "status 307" in warnings[0]


def test_no_url_posts_nothing_and_a_closed_port_is_a_warning_without_the_path() -> None:
    warnings: list[str] = []
    notifier(None, warnings).end(**END)
    assert warnings == []
    with web_server() as posts:
        url = posts.url
    notifier(url, warnings).end(**END)
    assert len(warnings) == 1
    assert "refused" in warnings[0]
    assert "secret-path" not in warnings[0]


@pytest.mark.parametrize("url", ["https://hooks.example/T0/secret", "http://localhost:9/x", Posts(1).url])
def test_https_and_this_machine_are_taken(url: str) -> None:
    check_url(url)


@pytest.mark.parametrize(
    "url",
    [
        "http://hooks.example/secret",
        "ftp://hooks.example/secret",
        "hooks.example/secret",
        "https://",
        "secret",
        "https://host:secret/",
        "https://host/a secret",
        "file:///secret",
    ],
)
def test_another_url_is_refused_without_being_repeated(url: str) -> None:
    with pytest.raises(JobError, match="notify is not a URL") as refused:
        check_url(url)
    assert "secret" not in str(refused.value)


def test_a_warning_of_a_limit_is_printed_and_posted_with_the_rows_that_are_left() -> None:
    with web_server() as posts:
        warnings: list[str] = []
        call = SimpleNamespace(
            options=SimpleNamespace(summary=None, notify=posts.url, incremental=False),
            run_id="r1",
            table=SimpleNamespace(name="labelled", format_name="Delta"),
            terminal=SimpleNamespace(warn=warnings.append),
        )
        end = EndRecord(cast(JobCall, call))
        end.counts.to_do = 500
        totals = SimpleNamespace(rows_error=3)
        collector = SimpleNamespace(totals=lambda: totals)
        end.run = cast(
            Run,
            SimpleNamespace(
                committed_rows=120, collector=collector, tracker=SimpleNamespace(run_id=None), drift=None
            ),
        )
        with end:
            end.warn_of_limit("380 rows will be left")
    assert warnings == ["380 rows will be left"]
    [told] = [body for body in posts.bodies if body["event"] == "budget"]
    assert (told["rows"], told["rows_left"], told["errors"], told["complete"]) == (120, 380, 3, False)


def test_a_secret_url_comes_from_the_environment_and_is_in_no_text_of_the_options(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PIPEMAX_NOTIFY_URL", "https://hooks.example/secret")
    values = {"input": "in", "output": "out", "prompt_column": "text", "model": "fake"}
    options = job_options(values, log_dir=tmp_path)
    assert options.notify == "https://hooks.example/secret"
    assert "hooks.example" not in repr(options)
    other = job_options(values | {"notify": "https://other.example/x"}, log_dir=tmp_path)
    assert other.notify == "https://other.example/x"
