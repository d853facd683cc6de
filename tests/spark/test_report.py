"""What the page of a run shows of the rows that the run has committed."""

import re
from collections.abc import Mapping
from dataclasses import replace
from html import unescape
from pathlib import Path

import pytest

from pipemax.wire import GenerationSpec
from pipemax_spark.errors import JobFailedError, TooManyErrorsError
from pipemax_spark.request.prompts import PromptSource
from tests.spark.conftest import Jobs, object_schema

LABELS = ("mild", "spicy")
SCRIPT = "<script>alert(1)</script>"


def page_of(jobs: Jobs) -> str:
    """Return the page of the last run, without the places where long words may break."""
    last = max(Path(jobs.directory, "runs").glob("*/report.html"), key=lambda path: path.stat().st_mtime_ns)
    return last.read_text(encoding="utf-8").replace("<wbr>", "")


def headings_of(page: str) -> list[str]:
    return [unescape(heading) for heading in re.findall(r"<h2>(.*?)</h2>", page)]


def sampled_prompts(page: str) -> list[str]:
    blocks = re.findall(r"<div class='name'>prompt[^<]*</div><div class='text'>(.*?)</div>", page, re.DOTALL)
    return [unescape(text) for text in blocks]


@pytest.fixture
def labelled(run: Jobs) -> Jobs:
    """Jobs on ten rows of which one has no prompt, one is a script and one is long."""
    texts = [f"row {i}" for i in range(7)] + [SCRIPT, "long " * 1_000, None]
    run.write_input([(i, text) for i, text in enumerate(texts)])
    run.defaults = replace(
        run.defaults, id_columns=("id",), generation=GenerationSpec(choice=LABELS, logprobs=True)
    )
    return run


def test_the_page_shows_errors_prompts_answers_probabilities_and_choices(labelled: Jobs) -> None:
    labelled.run(price_per_hour=3.0)
    page = page_of(labelled)
    assert headings_of(page)[:4] == [
        "Errors",
        "All rows with answers",
        "How the answers are distributed",
        "All facts",
    ], "the fake accounts for no time"
    for text in ("in.parquet", "Say {text}", "fake", "<b>10</b>", "<b>9</b><span>answers", "<span>cost"):
        assert text in page, text
    assert "<script" not in page
    assert set(sampled_prompts(page)) >= {f"Say {SCRIPT}", *(f"Say row {i}" for i in range(7))}
    length = len("Say " + "long " * 1_000)
    assert f"prompt, without its last {length - 1_000:,} characters" in page
    assert "empty_prompt: 1 row" in page
    assert re.search(r"the prompt is null.*text", unescape(page))
    rows = [row["annotation"] for row in labelled.rows() if row["annotation"]["error"] is None]
    shown = re.findall(r"annotation\.text, probability ([\d.]+)</div><div class='text'>(\w+)<", page)
    expected = [(f"{row['probabilities'][row['text']]:.2f}", row["text"]) for row in rows]
    assert sorted(shown) == sorted(expected)
    counts = dict(re.findall(r"<td>(\w+)</td><td class='n'>(\d+)</td>", page))
    texts = [row["text"] for row in rows]
    assert counts == {label: str(texts.count(label)) for label in LABELS if label in texts}
    longest = max(row["prompt_tokens"] for row in rows)
    assert f"at most {longest:,}</p>" in page


@pytest.mark.long  # as the page above
def test_without_a_sample_the_page_quotes_no_row_and_still_counts(labelled: Jobs) -> None:
    labelled.run(no_sample=True)
    page = page_of(labelled)
    assert headings_of(page)[:2] == ["Errors", "How the answers are distributed"]
    assert "empty_prompt: 1 row" in page
    assert not re.search(r"row \d|alert|long long|the prompt is null", page)


@pytest.mark.long  # a variant of the errors above
def test_a_run_whose_rows_all_fail_shows_prompts_and_messages_of_some(run: Jobs) -> None:
    run.write_input([(i, f"[[error]] {i}") for i in range(5)])
    with pytest.raises(JobFailedError):
        run.run(id_columns=("id",))
    page = page_of(run)
    assert "engine_error: 5 rows" in page
    assert len(sampled_prompts(page)) == 3
    assert all(re.fullmatch(r"Say \[\[error\]\] \d", prompt) for prompt in sampled_prompts(page))
    assert not {"All rows with answers", "How the answers are distributed"} & set(headings_of(page))


@pytest.mark.long  # as the page above
def test_a_run_that_its_errors_stop_early_has_a_page_that_says_why(run: Jobs) -> None:
    # One row would take minutes, so the run cannot end before its errors are known.
    run.write_input([(i, "[[slow 300]]" if i == 0 else f"[[error]] {i}") for i in range(1_500)])
    with pytest.raises(TooManyErrorsError) as stopped:
        run.run(id_columns=("id",))
    page = page_of(run)
    assert "The run was stopped" in page
    assert str(stopped.value) in unescape(page)
    assert "<b>0</b><span>rows" in page
    assert f"Report   {run.directory}" in run.printed


@pytest.mark.long  # a variant of the choices
def test_only_closed_fields_of_a_schema_are_counted_and_prompts_that_the_output_lacks_are_left_out(
    run: Jobs,
) -> None:
    run.write_input([(i, f"row {i}") for i in range(20)])
    schema = object_schema(
        tone={"enum": ["kind", "rude"]}, is_spam={"type": "boolean"}, why={"type": "string"}
    )
    generation = GenerationSpec(response_format=schema, max_tokens=16)
    run.run(id_columns=("id",), select=("id",), generation=generation)
    parsed = [row["annotation"]["parsed"] for row in run.rows()]
    page = page_of(run)
    for name in ("tone", "is_spam"):
        part = page.partition(f"<h3>annotation.parsed.{name}</h3>")[2].partition("</table>")[0]
        counts = {value: int(rows) for value, rows in re.findall(r"<td>(\w+)</td><td class='n'>(\d+)<", part)}
        values = [str(row[name]) if name == "tone" else str(row[name]).lower() for row in parsed]
        assert counts == {value: values.count(value) for value in set(values)}, name
    assert "annotation.parsed.why" not in page
    assert "10 of the rows with answers" in headings_of(page)
    assert sampled_prompts(page) == []


@pytest.mark.long
def test_a_nightly_job_shows_its_last_runs_next_to_each_other(run: Jobs) -> None:

    def night(rows: Mapping[int, str]) -> str:
        run.write_input([*rows.items()])
        run.run(id_columns=("id",))
        return page_of(run)

    first = {i: f"row {i}" for i in range(4)}
    assert "The last runs" not in headings_of(night(first))
    second = first | {i: f"row {i}" for i in range(4, 10)} | {10: "[[error]]"}
    page = night(second)
    assert "The last runs" in headings_of(page)
    table = page.partition("<h2>The last runs</h2>")[2].partition("</table>")[0]
    runs = [re.findall(r"<td[^>]*>([^<]*)</td>", row) for row in re.findall(r"<tr.*?</tr>", table)[1:]]
    assert [cells[1:4] for cells in runs] == [["7", "1", "14.3%"], ["4", "0", "0.0%"]]
    assert table.count("class=now") == 1


@pytest.mark.long  # a variant of the sample
def test_questions_each_have_their_answers_in_the_sample(run: Jobs) -> None:
    from pipemax_spark.executor.questions import Question

    run.write_input([(1, "a")])
    asked = tuple(
        Question(name=name, template=f"{name}?", generation=GenerationSpec(choice=LABELS))
        for name in ("taste", "smell")
    )
    run.run(ask=asked, source=PromptSource(prompt_column="text"))
    page = page_of(run)
    for name in ("taste", "smell"):
        assert f"<div class='name'>{name}.text</div>" in page
        assert f"<h3>{name}.text</h3>" in page


def test_runaway_outputs_are_counted_with_the_option_that_ends_them(run: Jobs) -> None:
    run.write_input([(i, "[[loop]]" if i < 3 else f"row {i}") for i in range(10)])
    rows = run.spark.read.parquet(run.defaults.input)
    own = "named_struct('stop_repetition', IF(id = 0, CAST(NULL AS INT), 8)) AS options"
    rows.selectExpr("*", own).write.parquet(f"{run.defaults.input} 2")
    run.run(
        input=f"{run.defaults.input} 2",
        overrides_column="options",
        generation=GenerationSpec(max_tokens=64),
    )
    assert "1 (10.0%) cut at --max-tokens, 2 (20.0%) ended by --stop-repetition" in run.printed
    assert "about 1 of those cut repeat themselves at their end; --stop-repetition 8" in run.printed
    ends = {row["id"]: row["annotation"] for row in run.rows()}
    assert [(ends[i]["finish_reason"], ends[i]["completion_tokens"]) for i in range(4)] == [
        ("length", 64),
        ("repetition", 9),
        ("repetition", 9),
        ("stop", 5),
    ]
    assert {row["error"] for row in ends.values()} == {None}
