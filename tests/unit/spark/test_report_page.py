"""The page of a run, as text and in a browser."""

import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from math import sin
from pathlib import Path

import pytest

from pipemax.wire import JobStats
from pipemax_spark.report.charts import TimeAxis, charts_of
from pipemax_spark.report.engine_tracks import EngineTrack, EngineTracks
from pipemax_spark.report.metric_names import SHOWN_METRICS, run_metric, total_metric
from pipemax_spark.report.report_page import report_page
from pipemax_spark.report.summary import Findings, Summary
from tests.fakes.server_reports import server_report

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
SUMMARY = Summary(
    rows_in=9,
    rows_out=9,
    rows_error=2,
    rows_skipped=0,
    output="main.support.labelled",
    seconds=72_000.0,
    engines=3,
    completion_tokens=90,
    time_account_s={"start_up": 20.0, "prefill": 30.0, "decode": 149.0, "prefetch_stall": 1.0},
)
FINDINGS = Findings(
    errors={"response_format": (2, "not <b>JSON</b>")},
    sample=[{"id": 1, "text": "a <script>alert(1)</script>"}],
)


def tracks_of(seconds: int, *, engines: int = 1, is_calibrated: bool = True) -> EngineTracks:
    tracks = EngineTracks()
    for step in range(240):
        at_s = seconds * (step + 1) / 240
        for number in range(engines):
            metrics = {
                "measured_step_s": 0.02 + 0.01 * sin(step),
                "predicted_step_s": 0.02,
                "host_kv_usage": 0.5,
                "is_calibrated": float(is_calibrated),
            }
            job = JobStats(rows_done=step * 7, completion_tokens=step * 700)
            stats = server_report(
                f"node{number}:{4000 + number}",
                at_s=at_s,
                job=job,
                phase=("prefill", "decode")[step // 9 % 2],
                kv_usage=0.7,
                engine_metrics=metrics,
            )
            tracks.add(replace(stats, state="ready"), job, reported_s=at_s)
    return tracks


def page_of(tracks: EngineTracks) -> str:
    charts = charts_of(tracks.by_server)
    return report_page(SUMMARY, FINDINGS, {"Logs": "/logs"}, charts, run_id="r1", price_per_hour=10.0)


def test_the_page_has_the_facts_and_escapes_what_models_and_rows_say() -> None:
    page = page_of(tracks_of(60, engines=3))
    for expected in (
        "main.support.labelled",
        "20 h 00 min",
        "200.00",
        "74.5%",
        "engine 3: node2:4002",
        "/logs",
    ):
        assert expected in page, expected
    assert "not &lt;b&gt;JSON&lt;/b&gt;" in page
    assert "<script" not in page
    assert not re.findall(r"""(?:src|href)=["'](?!#|data:)""", page), "nothing is loaded from elsewhere"
    assert not re.search(r"\bid=", page), "the drawings share no ids"


def test_what_to_change_is_said_of_large_parts_only() -> None:
    page = page_of(tracks_of(60))
    assert "Shorten the template" in page
    assert "Raise num_batches" not in page


def test_predictions_are_drawn_once_they_are_calibrated() -> None:
    for is_calibrated in (True, False):
        steps = charts_of(tracks_of(60, is_calibrated=is_calibrated).by_server)["steps"]
        assert ("predicted, ms" in steps) is is_calibrated


@pytest.mark.parametrize(("seconds", "unit"), [(60, "seconds"), (1_200, "minutes"), (72_000, "hours")])
def test_time_has_the_unit_that_suits_the_run(seconds: int, unit: str) -> None:
    track = EngineTrack()
    track.reported_s.append(float(seconds))
    assert TimeAxis.of([track]).name == unit


class _Title(HTMLParser):
    text = ""

    def handle_data(self, data: str) -> None:
        if self.lasttag == "title":
            self.text += data


@pytest.mark.skipif(BROWSER is None, reason="needs Chromium (Debian: apt-get install chromium)")
@pytest.mark.parametrize(
    ("seconds", "width"),
    [
        (60, 1280),
        (72_000, 420),
        pytest.param(60, 420, marks=pytest.mark.long),
        pytest.param(72_000, 1280, marks=pytest.mark.long),
    ],
)
def test_a_browser_shows_the_page_without_errors_and_without_scrolling_sideways(
    tmp_path: Path, seconds: int, width: int
) -> None:
    page = page_of(tracks_of(seconds, engines=3))
    measure = "<script>document.title = document.documentElement.scrollWidth + ' ' + innerWidth</script>"
    (tmp_path / "page.html").write_text(page.replace("</body>", f"{measure}</body>"), encoding="utf-8")
    assert BROWSER is not None
    shown = subprocess.run(
        [
            *(BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr"),
            *(f"--user-data-dir={tmp_path / 'profile'}", f"--window-size={width},900", "--dump-dom"),
            (tmp_path / "page.html").as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert "CONSOLE" not in shown.stderr
    title = _Title()
    title.feed(shown.stdout)
    content, window = map(int, title.text.split())
    assert content <= max(window, width), f"the page is {content} wide in a window of {window}"
    assert shown.stdout.count("<svg") == 4


def test_metrics_come_in_groups() -> None:
    assert run_metric("rows_per_s") == "throughput/rows_per_s"
    assert total_metric("time_decode_s") == "time/decode_s"
    assert total_metric("rows_out") == "total/rows_out"
    assert {run_metric(name) for name in SHOWN_METRICS}, "each of the engines' figures has a group"
