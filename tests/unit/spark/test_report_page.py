"""The page of a run, as text and in a browser."""

import json
import re
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from html import escape
from html.parser import HTMLParser
from io import StringIO
from math import sin
from pathlib import Path

import pytest
from rich.console import Console

from pipemax.wire import JobStats
from pipemax_spark.report.accuracy import Accuracy, Confusions
from pipemax_spark.report.charts import TimeAxis, charts_of
from pipemax_spark.report.distributions import Choices, Distributions, Lengths
from pipemax_spark.report.engine_tracks import EngineTrack, EngineTracks
from pipemax_spark.report.past_runs import PastRun, started_at
from pipemax_spark.report.quality import AnswerQuality
from pipemax_spark.report.report_page import RunFacts, report_page
from pipemax_spark.report.sampled_rows import Excerpt, SampledAnswer, SampledRow
from pipemax_spark.report.samples import SHOWN_METRICS, run_metric, total_metric
from pipemax_spark.report.summary import Findings, Summary, print_report
from pipemax_spark.request.prices import Prices
from pipemax_spark.rows.annotated import ANNOTATION
from tests.browser import needs_browser, open_page
from tests.fakes.server_reports import server_report

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
SCRIPT = "<script>alert(1)</script>"
RUN = RunFacts(
    run_id="20261127T151833-58640db4",
    input=f"main.support.tickets {SCRIPT}",
    prompt=f"Summarise: {{body}} {SCRIPT}",
    system=SCRIPT,
    model="org/name",
    versions="PipeMax 0.1.0, Spark 4.2.0",
    started=datetime(2026, 11, 27, 15, 18, 33, tzinfo=UTC),
    ended=datetime(2026, 11, 28, 11, 20, tzinfo=UTC),
)


def sampled(number: int, *, error: tuple[str, str] | None = None) -> SampledRow:
    answer = SampledAnswer(
        name="annotation.text",
        answer=None if error else Excerpt.of(f"answer {number} {SCRIPT}"),
        error=error,
        probability=None if error else 0.875,
    )
    prompt = Excerpt(text=f"{SCRIPT} prompt {number} " + "of several words " * 50, left_out=4_321)
    return SampledRow(
        columns={"id": f"{number}", SCRIPT: SCRIPT}, truths={"truth": SCRIPT}, prompt=prompt, answers=[answer]
    )


FINDINGS = Findings(
    accuracies=[
        Accuracy(
            column="section",
            right=745,
            rows=1_000,
            rows_error=20,
            confusions=Confusions(
                classes=[SCRIPT, "devel"],
                rows={(SCRIPT, SCRIPT): 700, (SCRIPT, "devel"): 100, ("devel", "devel"): 45},
                others={"devel": 135},
                errors={"devel": 20},
            ),
            worst_rows=[sampled(11)],
        )
    ],
    errors={"response_format": (2, "not <b>JSON</b>")},
    error_rows={"response_format": [sampled(0, error=("response_format", "not <b>JSON</b>"))]},
    sample=[sampled(number) for number in range(1, 11)],
    distributions=Distributions(
        choices=[Choices(name="annotation.parsed.section", rows={SCRIPT: 5, "devel": 2})],
        lengths=[
            Lengths(name="prompt tokens", rows={3: 1, 80: 5, 200: 1}),
            Lengths(name="generated tokens", rows={7: 7}),
        ],
        quality=[
            AnswerQuality(
                name=ANNOTATION,
                became={"answer": 7, "response_format": 2},
                rows_retried=3,
                percents={12: 1, 49: 1, 50: 2, 99: 3},
                agreements={1.0: 5, 0.6: 2},
            )
        ],
    ),
    past_runs=[
        PastRun(
            run_id=run_id,
            started=started_at(run_id),
            seconds=72_000.0,
            rows=9,
            rows_error=2,
            prompt_tokens=700,
            completion_tokens=90,
        )
        for run_id in (RUN.run_id, "20261126T151833-11111111")
    ],
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
    return report_page(RUN, SUMMARY, FINDINGS, {"Logs": "/logs"}, charts, prices=Prices(per_hour=10.0))


def test_the_page_has_the_facts_and_escapes_what_models_and_rows_say() -> None:
    page = page_of(tracks_of(60, engines=3)).replace("<wbr>", "")
    for expected in (
        "main.support.labelled",
        "20 h 00 min",
        "2026-11-28 11:20:00 UTC, 20 h 01 min later",
        "200.00",
        "74.5%",
        "of 1,000 rows agree with column &#x27;section&#x27;",
        "engine 3: node2:4002",
        "/logs",
    ):
        assert expected in page, expected
    assert "not &lt;b&gt;JSON&lt;/b&gt;" in page
    assert "answer 10 &lt;script&gt;alert(1)" in page
    assert "prompt, without its last 4,321 characters" in page
    assert "probability 0.88" in page
    assert "<script" not in page
    assert not re.findall(r"""(?:src|href)=["'](?!#|data:)""", page), "nothing is loaded from elsewhere"
    assert not re.search(r"\bid=", page), "the drawings share no ids"


def test_the_page_and_the_facts_say_how_good_the_answers_are() -> None:
    page = page_of(tracks_of(60)).replace("<wbr>", "")
    for expected in (
        "74.5% (95 %: 71.7% to 77.1%): 745 of 1,000 rows agree",
        "most often &#x27;devel&#x27; as another answer 135, ",
        "median 0.50, lowest quarter up to 0.49; 2 of 7 answers (28.6%) are below 0.5",
        "all samples agree in 71.4% of 7 rows; on average 88.6% of a row&#x27;s samples gave its answer",
        "2 (22.2%) response_format",
        "3 of 9 rows (33.3%)",
        "answer 11 &lt;script&gt;",
    ):
        assert expected in page, expected
    devel = re.search(r"<tr><td class='part'>devel</td>(.*?)</tr>", page)
    assert devel is not None
    assert re.findall(r"<td class='n'[^>]*>([^<]*)</td>", devel[1]) == [
        *("", "45", "135", "20"),
        *("200", "22.5%", "31.0%"),
    ]


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """How a browser shows a page."""

    width: int
    """Of its content, in pixels."""
    broken: list[str]
    """Words that stand on two lines."""
    empty: list[str]
    """Headings with nothing below them."""
    is_dark: bool


LOOK = """
const frame = document.querySelector('iframe'), page = frame.contentDocument, broken = [], empty = [];
const texts = page.createTreeWalker(page.body, NodeFilter.SHOW_TEXT);
while (texts.nextNode()) {
  for (const word of texts.currentNode.data.matchAll(/[\\p{L}\\p{N}]+/gu)) {
    const range = page.createRange();
    range.setStart(texts.currentNode, word.index);
    range.setEnd(texts.currentNode, word.index + word[0].length);
    if (new Set([...range.getClientRects()].map(rect => Math.round(rect.top))).size > 1) broken.push(word[0]);
  }
}
for (const heading of page.querySelectorAll('h2, h3')) {
  const next = heading.nextElementSibling;
  if (!next || next.tagName <= heading.tagName && next.tagName[0] == 'H' || !next.getBoundingClientRect().height)
    empty.push(heading.textContent);
}
const light = color => color.match(/\\d+/g).slice(0, 3).reduce((sum, part) => sum + Number(part), 0);
const style = frame.contentWindow.getComputedStyle(page.body);
const is_dark = light(style.backgroundColor) < light(style.color);
document.title = JSON.stringify({width: page.documentElement.scrollWidth, broken, empty, is_dark});
"""


def shown_by_browser(directory: Path, page: str, *, width: int, is_dark: bool = False) -> Shown:
    """Have the browser show the page in a frame, which may be narrower than a browser's windows are."""
    frame = f"<iframe width={width} height=900 style='border:0' srcdoc='{escape(page)}'></iframe>"
    look = f"<script>addEventListener('load', () => {{ {LOOK} }})</script>"
    (directory / "frame.html").write_text(f"<!doctype html>{frame}{look}", encoding="utf-8")
    document, console = open_page(
        (directory / "frame.html").as_uri(),
        directory / "profile",
        "--window-size=1400,900",
        *(["--blink-settings=preferredColorScheme=0"] if is_dark else []),
    )
    assert console == []
    title = _Title()
    title.feed("".join(document.rpartition("<title>")[1:]))
    return Shown(**json.loads(title.text))


@needs_browser
@pytest.mark.parametrize(
    ("seconds", "width", "is_dark"),
    [
        (60, 1280, True),
        (72_000, 390, False),
        pytest.param(60, 390, True, marks=pytest.mark.long),
        pytest.param(72_000, 1280, False, marks=pytest.mark.long),
    ],
)
def test_a_browser_shows_the_page_without_broken_words_or_scrolling_sideways(
    tmp_path: Path, seconds: int, width: int, is_dark: bool
) -> None:
    page = page_of(tracks_of(seconds, engines=3))
    shown = shown_by_browser(tmp_path, page, width=width, is_dark=is_dark)
    assert shown.width <= width
    assert shown.broken == []
    assert shown.empty == []
    assert shown.is_dark is is_dark
    assert page.count("<svg xmlns") == 6, (
        "four charts, probabilities, and the histogram of what differs in length"
    )


def test_the_printed_report_is_eight_lines_and_begins_with_rows_seconds_and_the_place() -> None:
    summary = Summary(
        rows_in=2_223,
        rows_out=2_223,
        output="demo/annotated",
        seconds=62.6,
        engines=1,
        prompt_tokens=208_894,
        completion_tokens=15_673,
        prefix_cache_hit_rate=0.0,
        time_account_s={"start_up": 23.0, "prefill": 6.0, "drain": 1.0},
        drain_at_full_rate_s=0.5,
    )
    findings = Findings(accuracies=[Accuracy(column="section", right=1_821, rows=2_223)])
    printed = StringIO()
    places = {"Report": "report.html", "MLflow run": "1234", "Logs": "logs"}
    print_report(Console(file=printed, width=80), summary, findings, places, prices=Prices())
    lines = printed.getvalue().strip().splitlines()
    assert len(lines) == 8
    assert lines[0] == (
        "Done               2,223 rows in 62.6 s; the answers are in the Delta table demo/annotated"
    )


def test_metrics_come_in_groups() -> None:
    assert run_metric("rows_per_s") == "throughput/rows_per_s"
    assert total_metric("time_decode_s") == "time/decode_s"
    assert total_metric("rows_out") == "total/rows_out"
    assert {run_metric(name) for name in SHOWN_METRICS}, "each of the engines' figures has a group"
