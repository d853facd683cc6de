"""Several questions about each row: their requests, and rows that end when all of their questions have."""

import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from pipemax.wire import COMPLETION_SCHEMA, GenerationSpec
from pipemax_spark.errors import JobError
from pipemax_spark.executor.client import EngineOptions
from pipemax_spark.executor.questions import AnswersByRow, question_requests
from pipemax_spark.executor.requests import request_batch
from pipemax_spark.executor.task import QuestionAnnotator, TaskPlan
from pipemax_spark.request.questions import asked_of_text, read_questions

BASE = GenerationSpec(max_tokens=16)


def completions(ids: list[int]) -> pa.RecordBatch:
    rows = [{"row_id": i, "text": f"answer {i}", "completed_at": 0} for i in ids]
    return pa.RecordBatch.from_pylist(rows, schema=COMPLETION_SCHEMA)


def test_a_row_s_requests_follow_one_another_and_begin_with_its_prompt() -> None:
    rows = request_batch(10, 3, prompt=pa.array(["a ", None, "b "]))
    endings = pa.array([["x?", "y?"], ["x?", "y?"], ["x?", None]])
    requests = question_requests(
        rows, endings, pa.array([[None, None]] * rows.num_rows, pa.list_(pa.string())), 2
    ).to_pylist()
    assert [(row["row_id"], row["prompt"], row["question"]) for row in requests] == [
        (20, "a x?", 0),
        (21, "a y?", 1),
        (22, None, 0),
        (23, None, 1),
        (24, "b x?", 0),
        (25, None, 1),
    ]


def test_rows_come_out_once_all_of_their_questions_have_ended() -> None:
    rng = random.Random(1)
    ids = list(range(3 * 40))
    rng.shuffle(ids)
    answers, seen = AnswersByRow(3), dict[int, list[str]]()
    for start in range(0, len(ids), 7):
        batches = answers.add(completions(ids[start : start + 7]))
        rows = [batch.column("row_id").to_pylist() for batch in batches]
        assert all(each == sorted(each) == rows[0] for each in rows)
        for row, *texts in zip(
            *rows[:1], *(batch.column("text").to_pylist() for batch in batches), strict=True
        ):
            assert row not in seen
            seen[row] = texts
    assert seen == {row: [f"answer {3 * row + question}" for question in range(3)] for row in range(40)}
    assert not answers._held, "nothing is held any more"


def test_questions_have_settings_of_their_own_and_take_the_others_from_the_job(tmp_path: Path) -> None:
    file = tmp_path / "questions.yaml"
    file.write_text(
        "label:\n  template: 'Which label?'\n  max_tokens: 3\n  stop: ['.']\n"
        "  response_format: {type: object, properties: {label: {type: string}}, required: [label]}\n"
        "short: Summarise it.\n"
    )
    asked = asked_of_text(["lang=Language?\\n", str(file)], lambda path: Path(path).read_text())
    lang, label, short = read_questions(asked, BASE)
    assert (lang.name, lang.template, lang.generation) == ("lang", "Language?\n", BASE)
    assert (label.generation.max_tokens, label.generation.stop) == (3, (".",))
    assert label.generation.response_format is not None
    assert (short.template, short.generation) == ("Summarise it.", BASE)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"a b": "x"}, "'a b' cannot be a column's name"),
        ({"annotation": "x"}, "'annotation' is the name of another column"),
        ({"Topic": "x", "topic": "y"}, "'topic' is the name of another column"),
        ({"topic": " "}, "question 'topic' has no template"),
        ({"topic": {"max_tokens": 3}}, "question 'topic' has no template"),
        (
            {"topic": {"template": "x", "max_token": 3}},
            "question 'topic' has 'max_token'. Did you mean 'max_tokens'",
        ),
        ({"topic": {"template": "x", "max_tokens": 0}}, "question 'topic': max_tokens is 0"),
    ],
)
def test_a_wrong_question_is_refused_by_its_name(asked: dict[str, Any], message: str) -> None:
    with pytest.raises(JobError, match=message):
        read_questions(asked, BASE)


def test_a_question_that_is_asked_twice_and_a_file_without_questions_are_refused() -> None:
    with pytest.raises(JobError, match="'lang' is asked twice"):
        asked_of_text(["lang=a", "lang=b"], lambda path: "")
    with pytest.raises(JobError, match="must hold a mapping"):
        asked_of_text(["questions.yaml"], lambda path: "just text")


def test_the_row_as_a_whole_has_all_tokens_the_first_error_and_the_last_end() -> None:
    questions = read_questions({"topic": "Topic?", "lang": {"template": "Lang?", "max_tokens": 3}}, BASE)
    plan = TaskPlan(
        options=EngineOptions(engine={"model": "m"}, job_id="job", generation=BASE),
        spec_hash="spec",
        run_id="run",
        output_column="annotation",
        questions=questions,
    )
    topic = {"row_id": 0, "text": "a", "prompt_tokens": 5, "completion_tokens": 2, "completed_at": 1}
    failed = {"row_id": 1, "error_code": "engine_error", "error_message": "it failed", "completed_at": 9}
    lang = [{**topic, "completed_at": 7}, {**topic, "row_id": 1, "completed_at": 8}]
    answers = [pa.RecordBatch.from_pylist(rows, schema=COMPLETION_SCHEMA) for rows in ([topic, failed], lang)]
    columns = QuestionAnnotator(plan).columns(answers)
    assert list(columns) == ["topic", "lang", "annotation"]
    ends = columns["annotation"].field("completed_at").cast(pa.int64()).to_pylist()
    whole = [columns["annotation"].field(name).to_pylist() for name in ("prompt_tokens", "completion_tokens")]
    assert (ends, whole) == ([7, 9], [[10, 5], [4, 2]])
    assert columns["annotation"].field("error").to_pylist() == [
        None,
        {"code": "engine_error", "message": "topic: it failed"},
    ]
