"""Several questions about each row, through real Spark: a column each, errors and reruns by question."""

import json
from pathlib import Path
from typing import Any

import pytest

from pipemax.wire import ErrorCode, GenerationSpec
from pipemax_spark.errors import JobError
from pipemax_spark.executor.questions import question_key
from pipemax_spark.executor.spool import Spool
from pipemax_spark.job.recovery import spooled_rows
from pipemax_spark.request.columns import RequestColumns, without_request_columns
from pipemax_spark.request.prompts import PromptSource
from pipemax_spark.request.questions import read_questions
from pipemax_spark.rows.workdir import LeftRun
from tests.fakes.settings import expected_text, fake_config
from tests.spark.conftest import Jobs, object_schema
from tests.unit.spark.test_questions import completions

ASK = {
    "topic": "Which topic? {mark}",
    "brief": {"template": "Briefly!", "max_tokens": 2},
    "label": {"template": "Label?", "response_format": object_schema(label={"type": "string"})},
}


@pytest.mark.long  # four jobs; tests/unit/spark/test_questions shows the columns
def test_each_question_has_a_column_and_a_failed_one_can_be_retried(run: Jobs) -> None:
    marks = {7: "[[error]]", 8: None}
    rows = [(i, f"text {i}", marks.get(i, "")) for i in range(300)]
    run.write_input(rows, "id long, text string, mark string")
    asked = read_questions(ASK, run.defaults.generation)
    options: dict[str, Any] = {"id_columns": ("id",), "ask": asked, "engine": fake_config(prefix_memory=3)}
    summary = run.run(**options)
    assert (summary.rows_out, summary.rows_error) == (300, 2)
    assert summary.prefix_cache_hit_rate is not None
    assert summary.prefix_cache_hit_rate > 0.4, "a row's questions come one after the other"
    assert "topic.text" in run.printed
    written = {row["id"]: row for row in run.rows()}
    assert sorted(written) == list(range(300))
    for i, row in written.items():
        if i not in marks:
            assert row["topic"]["text"] == expected_text(f"Say text {i}Which topic? ", 16)
        assert row["brief"]["text"] == expected_text(f"Say text {i}Briefly!", 2)
        assert json.loads(row["label"]["text"]) == row["label"]["parsed"]
        tokens = sum(row[name]["prompt_tokens"] or 0 for name in ASK)
        assert row["annotation"]["prompt_tokens"] == tokens
        assert row["annotation"]["text"] is None
    codes = {i: (written[i]["topic"]["error"] or {}).get("code") for i in (6, 7, 8)}
    assert codes == {6: None, 7: ErrorCode.ENGINE_ERROR, 8: ErrorCode.EMPTY_PROMPT}
    assert written[7]["annotation"]["error"]["message"].startswith("topic: ")
    assert written[7]["brief"]["error"] is None

    again = run.run(**options)
    assert (again.rows_out, again.rows_skipped) == (0, 300)
    run.write_input(
        [(i, text, "" if i in marks else mark) for i, text, mark in rows], "id long, text string, mark string"
    )
    retried = run.run(**options, retry_errors=True)
    assert (retried.rows_out, retried.rows_error) == (2, 0)
    written = {row["id"]: row for row in run.rows()}
    assert written[7]["topic"]["text"] == expected_text("Say text 7Which topic? ", 16)
    with pytest.raises(JobError, match="annotated in another way: ask was"):
        run.run(**options | {"ask": asked[:2]})


def test_rows_of_a_dead_run_are_recovered_if_all_of_their_questions_had_ended(
    spark: Any, tmp_path: Path
) -> None:
    questions = read_questions({"a": "A?", "b": "B?"}, GenerationSpec())
    columns = RequestColumns(PromptSource(prompt_column="text"), questions=questions)
    keyed = without_request_columns(
        columns.add_with_keys(spark.range(3).selectExpr("id", "'x' || id AS text"))
    )
    keys = {row["id"]: row["__pipemax_key"] for row in keyed.collect()}
    with Spool(str(tmp_path / "spool"), partition=0) as spool:
        import pyarrow as pa

        done = [(0, 1), (2, 0), (0, 0), (1, 1), (2, 1)]  # row 1 lacks its first answer
        spool.keep(
            pa.array([question_key(keys[row], question) for row, question in done]),
            completions([2 * row + question for row, question in done]),
        )
    run = LeftRun(run_id="dead", path=str(tmp_path), manifest={}, has_spool=True)
    found = spooled_rows(spark, keyed, run, questions=2).collect()
    texts = {row["id"]: [each["text"] for each in row["__pipemax_completion"]] for row in found}
    assert texts == {0: ["answer 0", "answer 1"], 2: ["answer 4", "answer 5"]}
