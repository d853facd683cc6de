"""Embed, classify and score through real Spark: as a job, a DataFrame and in SQL."""

from typing import Any

import numpy as np
import pytest
from pyspark.sql.types import ArrayType, FloatType

from pipemax.answers.pooled import cosine
from pipemax.wire import GenerationSpec
from pipemax_spark import annotate, register
from pipemax_spark.errors import JobError
from pipemax_spark.request.prompts import PromptSource
from tests.fakes.pooled import LABELS, VALUES, vector
from tests.fakes.settings import fake_config
from tests.spark.conftest import Jobs

EMBED = {
    "engine": fake_config() | {"task": "embed"},
    "generation": GenerationSpec(task="embed"),
    "source": PromptSource(prompt_column="text"),
    "id_columns": ("id",),
}


@pytest.mark.long  # three jobs; tests/unit/spark/test_pooling shows the columns
def test_a_job_embeds_each_row_once_and_goes_on_where_it_stopped(run: Jobs) -> None:
    # Rows 0 and 50 are equal, the last two are bad.
    run.write_input([*((i, f"row {i % 50}") for i in range(60)), (60, None), (61, "[[error]]")])
    first = run.run(**EMBED, limit=20, max_error_rate=1.0)
    assert (first.rows_out, first.rows_left_out) == (20, 42)
    summary = run.run(**EMBED, max_error_rate=1.0)
    assert (summary.rows_out, summary.rows_skipped) == (42, 20)
    assert first.rows_error + summary.rows_error == 2
    assert (summary.completion_tokens, summary.prompt_tokens > 0) == (0, True)
    assert "read tokens/s" in run.printed
    assert "annotation.embedding" in run.printed
    assert f"({VALUES} values)" in run.printed
    kind = run.spark.read.format("delta").load(run.output).schema["annotation"].dataType
    assert kind["embedding"].dataType == ArrayType(FloatType())
    assert "text" not in kind.names
    found = {row["id"]: row["annotation"] for row in run.rows()}
    assert len(run.rows()) == len(found) == 62
    for i in range(60):
        np.testing.assert_array_equal(np.float32(found[i]["embedding"]), vector(f"row {i % 50}"))
        assert (found[i]["prompt_tokens"], found[i]["error"]) == (2, None)
    assert [found[i]["error"]["code"] for i in (60, 61)] == ["empty_prompt", "engine_error"]
    with pytest.raises(JobError, match="dimensions was not given, is 4"):
        run.run(**EMBED | {"generation": GenerationSpec(task="embed", dimensions=4)})


def test_a_job_that_cannot_pool_is_refused_by_name(run: Jobs) -> None:
    run.write_input([(0, "a")])
    for changes, reason in [
        ({"generation": GenerationSpec(task="embed", max_tokens=9)}, "so max_tokens has no meaning"),
        ({"overrides_column": "text"}, "overrides-column is for generation, and the task is embed"),
        ({"gold_column": "text"}, "gold-column"),
        ({"source": PromptSource(messages_column="text")}, "give a prompt-column or a template"),
        ({"source": PromptSource(prompt_column="a", query_column="b")}, "query-column is for the task score"),
        ({"generation": GenerationSpec(task="score")}, "needs a query-column"),
        ({"engine": fake_config() | {"task": "embed", "policy": "pipemax"}}, "has nothing to schedule"),
    ]:
        with pytest.raises(JobError, match=reason):
            run.run(**EMBED | changes)


@pytest.mark.long  # as the job above
def test_a_frame_is_classified_and_scored(spark: Any, fake: dict[str, Any]) -> None:
    frame = spark.createDataFrame(
        [("what is it", "a package"), ("what is it", None), (" ", "b")], "q string, d string"
    )
    labelled = annotate(frame, prompt_column="d", task="classify", **fake).where("d IS NOT NULL").collect()
    for row in labelled:
        given = vector(row["d"], 2)
        assert row["annotation"]["probabilities"] == pytest.approx(
            dict(zip(LABELS.values(), given.tolist(), strict=True))
        )
        assert row["annotation"]["label"] == LABELS[int(given.argmax())]
    scored = annotate(frame, template="{d}", query_column="q", task="score", **fake).collect()
    by_document = {row["d"]: row["annotation"] for row in scored}
    expected = cosine(vector("what is it"), vector("a package"))
    assert by_document["a package"]["score"] == pytest.approx(expected)
    assert {by_document[d]["error"]["code"] for d in (None, "b")} == {"empty_prompt"}


@pytest.mark.long  # as the job above
def test_sql_embeds_and_scores(spark: Any, fake: dict[str, Any]) -> None:
    register(spark, "embedding_of", task="embed", dimensions=4, **fake)
    (row,) = spark.sql("SELECT embedding_of('a b').embedding AS e").collect()
    np.testing.assert_array_equal(np.float32(row["e"]), vector("a b", 4))
    register(spark, "score_of", task="score", **fake)
    rows = spark.sql(
        "SELECT id, score_of(concat('q ', id), if(id = 3, null, 'd')) AS s FROM range(5)"
    ).collect()
    for row in rows:
        if row["id"] == 3:
            assert row["s"]["error"]["code"] == "empty_prompt"
        else:
            assert row["s"]["score"] == pytest.approx(cosine(vector(f"q {row['id']}"), vector("d")))
    with pytest.raises(JobError, match="so max_tokens has no meaning"):
        register(spark, "wrong", task="embed", max_tokens=5, **fake)
