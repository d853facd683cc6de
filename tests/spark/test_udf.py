"""The UDF and SQL forms, and how often the engine is asked for each shape of query."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import pytest
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.types import DataType

from pipemax.serve.rows.arrow_rows import row_seed
from pipemax_spark import pipemax_udf, register
from pipemax_spark.errors import JobError
from tests.fakes.settings import expected_text, fake_config
from tests.spark.spark_work import set_to

ROWS = 600


@dataclass(frozen=True)
class Udf:
    """A UDF whose engine counts its requests."""

    spark: Any
    function: Callable[..., Any]

    def table(self, rows: int = ROWS, *, prefix: str = "word") -> Any:
        return self.spark.range(rows, numPartitions=2).selectExpr("id", f"concat('{prefix} ', id) AS text")

    def requests(self) -> int:
        """What the engine was asked so far, by its own count."""
        asked = self.spark.sql("SELECT concat('[[counts]] ', uuid()) AS text").select(
            self.function("text").text
        )
        # This question is one, too, and so are the earlier ones.
        return int(json.loads(asked.head()[0].partition(" ")[0])["submitted"])


@pytest.fixture(scope="module")
def udf(spark: Any, engine_python: str) -> Udf:
    return Udf(
        spark, pipemax_udf(engine=fake_config(model="udf"), engine_python=engine_python, max_tokens=16)
    )


def test_answers_are_returned_with_their_prompts_in_input_order(udf: Udf) -> None:
    rows = udf.table(3_000).select("id", "text", udf.function("text").alias("a")).collect()
    assert [row["id"] for row in rows] == list(range(3_000))
    assert all(row["a"]["text"] == expected_text(row["text"], 16) for row in rows)
    assert {row["a"]["error"] for row in rows} == {None}


def test_a_bad_row_becomes_an_error_row_and_good_rows_are_answered(udf: Udf) -> None:
    frame = udf.spark.createDataFrame([(0, "fine"), (1, None), (2, "[[error]]")], "id int, text string")
    rows = frame.select(udf.function("text").alias("a")).collect()
    assert [row["a"]["error"] and row["a"]["error"]["code"] for row in rows] == [
        None,
        "empty_prompt",
        "engine_error",
    ]


def test_conversations_are_a_column_too(udf: Udf) -> None:
    frame = udf.spark.sql("SELECT array(named_struct('role', 'user', 'content', 'one two')) AS chat")
    assert frame.select(udf.function("chat").text).head()[0] == expected_text("one two", 16)


# Of a table's rows the engine is asked once each, whatever Spark evaluates twice.
Action = Callable[[Any, Callable[..., Any]], Any]
SHAPES: dict[str, tuple[Action, int]] = {
    "two fields": (
        lambda table, f: table.select(f("text").text, f("text").completion_tokens).collect(),
        ROWS,
    ),
    "two fields of a subquery": (
        lambda table, f: table.select(f("text").alias("a")).select("a.text", "a.error").collect(),
        ROWS,
    ),
    "filter on a field": (
        lambda table, f: table.select(f("text").alias("a")).where("a.error IS NULL").collect(),
        ROWS,
    ),
    "order by a field": (
        lambda table, f: table.select(f("text").alias("a")).orderBy("a.text").collect(),
        ROWS,
    ),
    "join": (
        lambda table, f: table.select("id", f("text").alias("a")).join(table.limit(100), "id").collect(),
        ROWS,
    ),
    "cached": (lambda table, f: [table.select(f("text").text).cache().count() for _ in range(2)], ROWS),
    "count": (lambda table, f: table.select(f("text").alias("a")).count(), 0),
    # Spark asks more rows than these return: Python UDFs run before the expression or condition around them.
    "in CASE": (
        lambda table, f: table.select(F.when(F.col("id") < 10, f("text").text)).collect(),
        ROWS,
    ),
    "in WHERE": (
        lambda table, f: table.where((f("text").text.like("reply%")) & (F.col("id") < 10)).collect(),
        ROWS,
    ),
    "in EXISTS": (lambda table, f: _exists(table, f, where="true"), ROWS),
    # What to write instead.
    "in a part of a union": (
        lambda table, f: (
            table.where("id < 10")
            .select("id", f("text").text.alias("t"))
            .unionAll(table.where("NOT id < 10").selectExpr("id", "CAST(NULL AS string) AS t"))
            .collect()
        ),
        10,
    ),
    "after WHERE": (
        lambda table, f: (
            table.where("id < 10").select(f("text").text.alias("t")).where("t LIKE 'r%'").collect()
        ),
        10,
    ),
    "in EXISTS, after WHERE": (lambda table, f: _exists(table, f, where="id < 10"), 10),
}


def _exists(table: Any, function: Callable[..., Any], *, where: str) -> Any:
    answered = table.where(where).select("id", function("text").text.alias("t"))
    return table.where("id < 10").join(answered.where("t LIKE 'r%'"), "id", "left_semi").collect()


IN_MAKE_TEST = {"two fields", "filter on a field", "join", "in WHERE", "in EXISTS, after WHERE"}


@pytest.mark.parametrize(
    "shape",
    [pytest.param(shape, marks=[pytest.mark.long] * (shape not in IN_MAKE_TEST)) for shape in SHAPES],
)
def test_each_shape_of_query_asks_the_engine_once_per_row(udf: Udf, shape: str) -> None:
    action, rows = SHAPES[shape]
    table = udf.table(prefix=shape)
    before = udf.requests()
    action(table, udf.function)
    assert udf.requests() - before - 1 == rows
    action(table, udf.function)
    assert udf.requests() - before - 2 == rows, "a second evaluation costs nothing"


def test_chained_calls_share_the_engine(udf: Udf) -> None:
    chained = udf.table(500).select("text", udf.function(udf.function("text").text).alias("a")).collect()
    assert all(row["a"]["text"] == expected_text(expected_text(row["text"], 16), 16) for row in chained)


@pytest.fixture
def in_sql(spark: Any, engine_python: str) -> Iterator[Any]:
    register(
        spark,
        "pipemax_test",
        engine=fake_config(model="udf"),
        engine_python=engine_python,
        responseFormat={"type": "object", "properties": {"label": {"enum": ["a", "b"]}}},
        modelParameters={"max_tokens": 32, "temperature": 0.5},
        failOnError=True,
    )
    yield spark
    spark.sql("DROP TEMPORARY FUNCTION pipemax_test")


def test_the_sql_form_takes_ai_query_s_names(in_sql: Any) -> None:
    in_sql.range(50).createOrReplaceTempView("numbers")
    rows = in_sql.sql(
        "SELECT id, a.parsed.label AS label FROM (SELECT id, pipemax_test('word ' || id) AS a FROM numbers)"
    ).collect()
    assert [row["id"] for row in rows] == list(range(50))
    assert {row["label"] for row in rows} == {"a", "b"}
    with pytest.raises(Exception, match="a row failed with empty_prompt"):
        in_sql.sql("SELECT pipemax_test('') AS a").collect()


@pytest.fixture(scope="module", params=["arrow", "pandas"])
def form(request: pytest.FixtureRequest, spark: Any, engine_python: str) -> Iterator[Callable[..., Any]]:
    """Registers a UDF of one of the two forms: Spark 4.0, which has no Arrow UDFs, takes the other one."""

    def register_form(name: str, **options: Any) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            if request.param == "pandas":
                patch.delattr("pyspark.sql.functions.arrow_udf", raising=False)
            register(spark, name, engine=fake_config(model="udf"), engine_python=engine_python, **options)
        return spark

    yield register_form
    for name in ("pipemax_options", "pipemax_typed"):
        spark.sql(f"DROP TEMPORARY FUNCTION IF EXISTS {name}")


@pytest.fixture(scope="module")
def with_options(form: Callable[..., Any]) -> Any:
    return form("pipemax_options", max_tokens=16)


def test_a_struct_next_to_the_prompt_holds_options_of_the_row(with_options: Any) -> None:
    rows = with_options.sql(
        """SELECT pipemax_options('one two three', CASE id WHEN 0 THEN NULL ELSE named_struct(
            'max_tokens', nullif(id, 1), 'temperature', 0.0, 'stop', array(), 'seed', NULL) END).text AS text,
          pipemax_options('four five', NULL).text AS other
        FROM range(4)"""
    ).collect()
    assert [row["text"] for row in rows] == [expected_text("one two three", n) for n in (16, 16, 2, 3)]
    assert {row["other"] for row in rows} == {"reply to four five"}


def test_answers_are_remembered_with_the_options_that_they_had(with_options: Any) -> None:
    rows = with_options.sql(
        """SELECT pipemax_options('[[seed]]', named_struct('temperature', 0.5, 'seed', id)).text AS own,
          pipemax_options('[[seed]]', named_struct('temperature', 0.5)).text AS derived
        FROM range(4)"""
    ).collect()
    assert [row["own"] for row in rows] == ["0", "1", "2", "3"]
    assert {row["derived"] for row in rows} == {str(row_seed(0, "[[seed]]", None))}, (
        "equal rows, equal answers"
    )


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (
            "named_struct('max_token', 5)",
            "have the field 'max_token'; give a struct with any of max_tokens, ",
        ),
        (
            "named_struct('max_tokens', true)",
            "option max_tokens of a row is of the type bool; it must be int, another number, or string",
        ),
        (
            "named_struct('stop', 1)",
            "option stop of a row is of the type int32; it must be string or array<string>",
        ),
        ("'five'", "the options of a row are of the type string; give a struct"),
        ("NULL, NULL", "it was given 3 columns"),
    ],
)
def test_wrong_options_fail_the_query_with_their_name(with_options: Any, options: str, told: str) -> None:
    with pytest.raises(Exception, match=told):
        with_options.sql(f"SELECT pipemax_options('a', {options}) AS a").collect()


def test_an_option_out_of_range_is_an_error_of_its_row(with_options: Any) -> None:
    [row] = with_options.sql("SELECT pipemax_options('a', named_struct('top_p', 2)).error AS e").collect()
    assert row["e"]["code"] == "invalid_parameter"


@pytest.mark.parametrize("is_ansi", [True, False])
def test_an_option_that_does_not_fit_is_an_error_of_its_row_in_each_mode(
    with_options: Any, is_ansi: bool
) -> None:
    with set_to(with_options, {"spark.sql.ansi.enabled": str(is_ansi).lower()}):
        rows = with_options.sql(
            """SELECT v, pipemax_options('one two three', named_struct('max_tokens', v, 'stop', 'END')) AS a,
              pipemax_options('one two three', named_struct('max_tokens', id + 4294967296)).error AS wide
            FROM VALUES (1, '2'), (2, 'n/a'), (3, '3000000000'), (4, '2.0'), (5, ''), (6, NULL) AS t(id, v)
            ORDER BY id"""
        ).collect()
    two = expected_text("one two three", 2)
    assert [row["a"]["text"] for row in rows] == [
        two,
        None,
        None,
        two,
        None,
        expected_text("one two three", 16),
    ]
    told = [row["a"]["error"] and (row["a"]["error"]["code"], row["a"]["error"]["message"]) for row in rows]
    assert told[1] == ("invalid_parameter", "max_tokens is 'n/a', not a whole number")
    assert [one and one[0] for one in told] == [
        None,
        *["invalid_parameter"] * 2,
        None,
        "invalid_parameter",
        None,
    ]
    assert {row["wide"]["code"] for row in rows} == {"invalid_parameter"}


def test_a_spark_type_is_the_type_of_the_parsed_answer(form: Callable[..., Any]) -> None:
    ddl = (
        "STRUCT<result: STRUCT<label: STRING NOT NULL, count: INT, price: DECIMAL(10,2), day: DATE, at: TIMESTAMP,"
        " lines: ARRAY<STRUCT<n: BIGINT NOT NULL>>, share: FLOAT, by_shop: MAP<STRING, INT>>>"
    )
    spark = form("pipemax_typed", responseFormat=ddl, modelParameters={"max_tokens": 64})
    answers = spark.sql(
        "SELECT a.parsed, a.error FROM (SELECT pipemax_typed('word ' || id) AS a FROM range(3))"
    )
    assert answers.schema["parsed"].dataType == DataType.fromDDL(ddl)
    for row in answers.collect():
        assert row["error"] is None
        result = row["parsed"]["result"]
        assert isinstance(result["price"], Decimal)
        assert result["day"].month == result["at"].month == 1
        assert result["lines"][0]["n"] >= 0


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({}, "no model is named"),
        ({"engine": {"model": "fake"}, "response_format": "{"}, "response-format is not JSON"),
        (
            {"engine": {"model": "fake"}, "response_format": "STRUCT<a"},
            "neither a JSON schema nor a Spark type",
        ),
        ({"engine": {"model": "fake"}, "on_error": "skip"}, "on-error is 'skip'"),
        ({"endpoint": "fake", "model": "fake"}, "model is given twice"),
    ],
)
def test_a_wrong_option_is_refused_before_any_row(
    spark: Any, engine_python: str, options: dict[str, Any], told: str
) -> None:
    with pytest.raises(JobError, match=told):
        register(spark, "pipemax_wrong", engine_python=engine_python, **options)
