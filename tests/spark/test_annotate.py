"""``annotate()``: a transformation like any other, checked before it runs."""

from pathlib import Path
from typing import Any

import pytest
from pyspark.testing import assertDataFrameEqual

from pipemax_spark import annotate
from pipemax_spark.errors import JobError
from tests.fakes.engine_python import write_engine_python
from tests.fakes.settings import expected_text, fake_config
from tests.spark.spark_work import set_to
from tests.spark.test_killed_job import num_requests


def test_every_row_keeps_its_columns_and_gets_an_annotation(spark: Any, fake: dict[str, Any]) -> None:
    frame = spark.range(700, numPartitions=3).selectExpr("id", "concat('word ', id) AS text", "id % 7 AS n")
    annotated = annotate(frame, template="Say {text} {n}", **fake, max_tokens=16)
    assert annotated.columns == ["id", "text", "n", "annotation"]
    assertDataFrameEqual(annotated.drop("annotation"), frame)
    for row in annotated.where("n = 3").collect():
        assert row["annotation"]["text"] == expected_text(f"Say {row['text']} {row['n']}", 16)
        assert row["annotation"]["completed_at"] is not None


def test_a_schema_makes_a_typed_column(spark: Any, fake: dict[str, Any]) -> None:
    schema = {"type": "object", "properties": {"label": {"enum": ["a", "b"]}, "score": {"type": "number"}}}
    frame = spark.createDataFrame([("x",), (None,)], "text string")
    annotated = annotate(
        frame,
        prompt_column="text",
        **fake,
        response_format=schema,
        output_column="answer",
    )
    assert annotated.schema["answer"].dataType["parsed"].dataType.simpleString() == (
        "struct<label:string,score:double>"
    )
    good, bad = annotated.orderBy("text", ascending=False).select("answer").collect()
    assert good["answer"]["parsed"]["label"] in ("a", "b")
    assert (bad["answer"]["parsed"], bad["answer"]["error"]["code"]) == (None, "empty_prompt")


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"template": "{txt}"}, r"no column 'txt'\. Did you mean 'text'"),
        ({"prompt_column": "text", "output_column": "TEXT"}, "the input already has a column 'TEXT'"),
        ({"prompt_column": "text", "engine": {}}, "no model is named"),
        ({"messages_column": "text"}, "must be array<struct<role:string,content:string>>"),
        ({"prompt_column": "text", "overrides_column": "text"}, "give a struct with any of max_tokens"),
        ({"prompt_column": "text", "overrides_column": "flags"}, "option top_k of a row is of the type bool"),
        ({"messages_column": "parts"}, "messages-column: the parts of a message are of the type"),
        ({"prompt_column": "text", "image_column": "id"}, "image-column 'id' is of type int"),
        ({"messages_column": "text", "image_column": "text"}, "are parts of their messages"),
        ({"prompt_column": "text", "allow_image_urls": ["a.org"]}, "no column has images"),
        ({"prompt_column": "text", "resume": "x"}, "resume='x' names work that is kept in work_dir"),
        ({"prompt_column": "text", "work_dir": "/tmp", "resume": "a/b"}, "must be a name of letters"),
        ({"prompt_column": "text", "work_dir": "oddfs://x/y"}, "work_dir='oddfs://x/y' cannot be written to"),
    ],
)
def test_bad_requests_are_refused_at_once(
    spark: Any, fake: dict[str, Any], options: dict[str, Any], told: str
) -> None:
    frame = spark.sql(
        """SELECT 1 AS id, 'x' AS text, named_struct('top_k', true) AS flags,
          array(named_struct('role', 'user', 'content', array(named_struct('text', 5)))) AS parts"""
    )
    with pytest.raises(JobError, match=told):
        annotate(frame, **(fake | options))


@pytest.mark.parametrize("is_ansi", [True, False])
def test_what_does_not_fit_is_its_row_s_error_in_each_mode(
    spark: Any, fake: dict[str, Any], is_ansi: bool
) -> None:
    with set_to(spark, {"spark.sql.ansi.enabled": str(is_ansi).lower()}):
        frame = spark.sql(
            """SELECT id, text, named_struct('max_tokens', n, 'temperature', t, 'stop', s) AS options
            FROM VALUES (0, 'one two three', 2L, '0', ''), (1, 'a', 4294967299L, '0', 'x'),
              (2, 'a', NULL, 'n/a', 'x'), (3, 'a', NULL, 'NaN', 'x'), (4, NULL, NULL, NULL, NULL),
              (5, 'one two three', 2L, '0.0', 'END') AS t(id, text, n, t, s)"""
        )
        rows = annotate(
            frame,
            template="Say {text}",
            overrides_column="options",
            **fake,
            max_tokens=16,
        ).collect()
    told = {row["id"]: row["annotation"]["error"] for row in rows}
    assert {name: error and (error["code"], error["message"]) for name, error in told.items()} == {
        0: ("invalid_parameter", "stop has an empty text; leave it out"),
        1: (
            "invalid_parameter",
            "max_tokens is 4294967299, must be at least -2147483648 and below 2147483648",
        ),
        2: ("invalid_parameter", "temperature is 'n/a', not a number"),
        3: ("invalid_parameter", "temperature is 'NaN', not a number"),
        4: ("empty_prompt", "the prompt is null, because a column of its template is: text"),
        5: None,
    }
    (good,) = (row["annotation"]["text"] for row in rows if row["id"] == 5)
    assert good == expected_text("Say one two three", 2)


def test_columns_that_cannot_be_carried_are_told_by_name(spark: Any) -> None:
    for columns, told in (
        (["id", "'x' text", "1 a", "2 a"], "several columns of the name 'a'"),
        (["id", "'x' text", "INTERVAL '1' YEAR y"], "column 'y' is of type interval year"),
        (["id", "'x' text", "array(INTERVAL '1' MONTH) y"], "column 'y' is of type array<interval month>"),
    ):
        frame = spark.range(1).selectExpr(*columns)
        with pytest.raises(JobError, match=told):
            annotate(frame, model="m", prompt_column="text")


def test_large_arrow_types_and_intervals_of_days_are_carried(spark: Any, fake: dict[str, Any]) -> None:
    with set_to(spark, {"spark.sql.execution.arrow.useLargeVarTypes": "true"}):
        frame = spark.range(2).selectExpr(
            "id", "concat('t', id) text", "cast('b' as binary) b", "INTERVAL '1' DAY d",
            "array(named_struct('role', 'user', 'content', concat('t', id))) chat",
        )  # fmt: skip
        for source in ({"prompt_column": "text"}, {"messages_column": "chat"}):
            rows = annotate(frame, **fake, **source).collect()
            assert [row["annotation"]["error"] for row in rows] == [None, None], source
            assert {row["text"] for row in rows} == {"t0", "t1"}


@pytest.mark.long  # speed
def test_a_check_that_has_just_passed_is_not_repeated(spark: Any, tmp_path: Path) -> None:
    engine_python = write_engine_python(tmp_path / "python")
    frame = spark.createDataFrame([("x",)], "text string")
    options = {"prompt_column": "text", "engine": fake_config(), "engine_python": engine_python}
    annotate(frame, **options)
    (tmp_path / "python").write_text("#!/bin/sh\nexit 3\n")
    annotate(frame, **options)
    with pytest.raises(JobError, match="could not check the engine"):
        annotate(frame, **options, max_tokens=7)


@pytest.mark.long  # tests/unit/spark/test_spool.py has the spool
def test_rows_spooled_in_the_work_dir_are_not_asked_again(
    spark: Any, engine_python: str, tmp_path: Path
) -> None:
    frame = spark.range(600, numPartitions=3).selectExpr("id", "concat('word ', id % 500) AS text")
    options: dict[str, Any] = {
        "prompt_column": "text",
        "engine": fake_config(),
        "engine_python": engine_python,
        "work_dir": str(tmp_path),
        "temperature": 0.5,  # without a seed, so that the server computes equal requests each time
    }
    asked = num_requests(spark, engine_python) + 1
    once = annotate(frame, **options)
    first = once.collect()
    assert num_requests(spark, engine_python) - asked == 600
    asked += 601
    assert sorted(once.collect()) == sorted(first), "the very same completions, their times included"
    assert num_requests(spark, engine_python) - asked == 0

    # Under a name also another call, whatever the order of its rows.
    asked += 1
    named = annotate(frame, **options, resume="nightly").collect()
    more = frame.orderBy("text").unionAll(spark.createDataFrame([(1_000, "new")], frame.schema))
    again = annotate(more, **options, resume="nightly").collect()
    assert num_requests(spark, engine_python) - asked == 601
    assert sorted(row["id"] for row in again) == [*range(600), 1_000]
    known = {row["text"]: row["annotation"]["text"] for row in named}
    assert all(row["annotation"]["text"] == known[row["text"]] for row in again if row["id"] < 1_000)
