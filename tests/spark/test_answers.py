"""What tables ask of models beyond a text, through real Spark: choices, samples, attempts, thinking, confidence."""

import re
from typing import Any

import pytest

from pipemax.wire import GenerationSpec
from pipemax_spark import annotate, register
from pipemax_spark.errors import JobError
from tests.fakes.settings import fake_config
from tests.spark.conftest import Jobs, object_schema

LABELS = ("bug", "question", "praise")
SCHEMA = object_schema(label={"enum": list(LABELS)})


def annotations(jobs: Jobs) -> dict[int, dict[str, Any]]:
    return {row["id"]: row["annotation"] for row in jobs.rows()}


@pytest.mark.long  # three jobs; SQL asks for a choice, below
def test_a_choice_job_has_one_label_and_each_label_s_probability_per_row(run: Jobs) -> None:
    run.write_input([(i, f"row {i}", LABELS[i % 3]) for i in range(40)], "id long, text string, label string")
    generation = GenerationSpec(choice=LABELS, logprobs=True)
    summary = run.run(generation=generation, id_columns=("id",), gold_column="label")
    assert re.search(r"Accuracy .*of 40 rows agree with column 'label'", run.printed)
    assert (summary.rows_out, summary.rows_error) == (40, 0)
    assert summary.completion_tokens == 40, "a token for each row"
    for answer in annotations(run).values():
        assert answer["text"] in LABELS
        assert sorted(answer["probabilities"]) == sorted(LABELS)
        assert answer["text"] == max(answer["probabilities"], key=answer["probabilities"].get)
        assert sum(answer["probabilities"].values()) == pytest.approx(1.0)
    again = run.run(generation=generation, id_columns=("id",))
    assert again.rows_skipped == 40
    with pytest.raises(JobError, match="choice was"):
        run.run(generation=GenerationSpec(choice=LABELS[:2], logprobs=True), id_columns=("id",))


def test_samples_thinking_and_their_errors_are_columns_only_where_asked_for(
    spark: Any, engine_python: str
) -> None:
    frame = spark.createDataFrame([("a",), ("b " * 40,)], "text string")
    options = {"prompt_column": "text", "engine_python": engine_python}
    plain = annotate(frame, engine=fake_config(), **options).schema["annotation"].dataType.names
    asked = {
        "reasoning",
        "reasoning_tokens",
        "samples",
        "agreement",
        "attempts",
        "logprob_sum",
        "probabilities",
    }
    assert not asked.intersection(plain)
    thinking = fake_config() | {"reasoning_parser": "qwen3"}
    annotated = annotate(
        frame, engine=thinking, n=5, temperature=1.0, seed=4, max_tokens=30, attempts=2, **options
    )
    short, long = (row["annotation"] for row in annotated.orderBy("text").collect())
    assert len(short["samples"]) == 5
    assert short["agreement"] == short["samples"].count(short["text"]) / 5
    assert short["reasoning"] == f"thinking about {short['text']}"
    assert 0 < short["reasoning_tokens"] < short["completion_tokens"]
    assert short["attempts"] == 1
    assert (long["error"]["code"], long["text"], long["samples"]) == (
        "reasoning_unfinished",
        None,
        [None] * 5,
    )
    assert long["reasoning"].startswith("thinking about reply to b")
    left_out = annotate(frame, engine=thinking, include_reasoning=False, **options)
    names = left_out.schema["annotation"].dataType.names
    assert "reasoning_tokens" in names
    assert "reasoning" not in names


def test_sql_takes_choices_and_template_variables(spark: Any, engine_python: str) -> None:
    register(
        spark,
        "label_of",
        engine=fake_config() | {"reasoning_parser": "qwen3"},
        engine_python=engine_python,
        choice=list(LABELS),
        logprobs=True,
        chat_template_kwargs={"enable_thinking": False},
    )
    [row] = spark.sql("SELECT label_of('x').text AS text, label_of('x').probabilities AS p").collect()
    assert row["text"] in LABELS
    assert row["p"][row["text"]] == max(row["p"].values())


def test_what_cannot_be_asked_for_is_refused_before_an_engine_starts(
    spark: Any, fake: dict[str, Any]
) -> None:
    frame = spark.createDataFrame([("x",)], "text string")
    with pytest.raises(JobError, match="choice has 'a' twice"):
        annotate(
            frame,
            prompt_column="text",
            **fake,
            choice=["a", "b", "a"],
        )
