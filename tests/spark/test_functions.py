"""The ready functions in SQL and in Python: what they return, and what becomes of wrong arguments and bad rows."""

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from typing import Any

import pytest
from pyspark.sql.types import DataType

from pipemax_spark import pipemax_udf, pm_classify, pm_extract, register_functions
from pipemax_spark.errors import JobError
from pipemax_spark.functions.ready import Kind
from tests.fakes.settings import fake_config

LABELS = ["bug", "question", "praise"]
CLASSIFY = "{labels}|{text}"
EXTRACT = "{schema}|{text}"


@pytest.fixture(scope="module", params=["arrow", "pandas"])
def registered(
    request: pytest.FixtureRequest, spark: Any, engine_python: str
) -> Iterator[Callable[..., Any]]:
    """Registers the functions as UDFs of one of the two forms: Spark 4.0, which has no Arrow UDFs, takes the other."""

    def register_form(**options: Any) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            if request.param == "pandas":
                patch.delattr("pyspark.sql.functions.arrow_udf", raising=False)
            register_functions(spark, engine=fake_config(model="udf"), engine_python=engine_python, **options)
        return spark

    yield register_form
    for kind in Kind:
        spark.sql(f"DROP TEMPORARY FUNCTION IF EXISTS {kind.value}")


@pytest.fixture
def functions(registered: Callable[..., Any]) -> Any:
    return registered(classify_template=CLASSIFY, extract_template=EXTRACT)


def test_they_find_the_session_in_a_thread_that_has_none_of_its_own(
    functions: Any, engine_python: str
) -> None:
    def made() -> Any:
        # Also the main thread has none after a call to the JVM was interrupted.
        pipemax_udf(
            engine=fake_config(model="udf"), engine_python=engine_python, response_format="STRUCT<a: INT>"
        )
        return functions.createDataFrame([("word",)], "text string").select(
            pm_classify("text", LABELS).alias("label")
        )

    with ThreadPoolExecutor(1) as thread:
        rows = thread.submit(made).result()
    assert rows.head()["label"] in LABELS


def test_sql_classifies_each_text_as_one_of_the_labels(functions: Any, engine_python: str) -> None:
    functions.sql(
        "SELECT id, CASE WHEN id % 7 > 0 THEN 'word ' || id END AS text FROM range(600)"
    ).createOrReplaceTempView("texts")
    rows = functions.sql(
        "SELECT id, text, pm_classify(text, array('bug', 'question', 'praise')) AS label FROM texts"
    ).collect()
    ask = pipemax_udf(engine=fake_config(model="udf"), engine_python=engine_python, choice=LABELS)
    asked = functions.sql(
        "SELECT 'bug, question, praise|' || text AS prompt FROM texts WHERE text IS NOT NULL"
    )
    expected = [row["text"] for row in asked.select(ask("prompt").text.alias("text")).collect()]
    assert [row["id"] for row in rows] == list(range(600))
    assert [row["label"] for row in rows if row["text"] is not None] == expected
    assert {*expected} == {*LABELS}
    assert {row["label"] for row in rows if row["text"] is None} == {None}


def test_python_classifies_as_sql_does(functions: Any) -> None:
    frame = functions.range(20).selectExpr("concat('word ', id) AS text")
    frame.createOrReplaceTempView("texts")
    in_python = frame.select(pm_classify("text", LABELS).alias("label")).collect()
    in_sql = functions.sql("SELECT pm_classify(text, array('bug', 'question', 'praise')) AS label FROM texts")
    assert in_python == in_sql.collect()


def test_sql_extracts_the_json_of_an_object(functions: Any) -> None:
    schema = '{"type": "object", "properties": {"name": {"type": "string"}, "year": {"type": "integer"}}}'
    [row] = functions.sql(
        f"SELECT e, from_json(e, 'name STRING, year INT').year AS year, "
        f"pm_extract(CAST(NULL AS STRING), '{schema}') AS n "
        f"FROM (SELECT pm_extract('a text', '{schema}') AS e)"
    ).collect()
    assert json.loads(row["e"]).keys() == {"name", "year"}
    assert row["year"] == json.loads(row["e"])["year"]
    assert row["n"] is None


def test_names_are_a_schema_of_texts(functions: Any) -> None:
    [row] = functions.sql(
        "SELECT from_json(pm_extract('a text', array('who', 'where')), 'who STRING') AS e"
    ).collect()
    assert isinstance(row["e"]["who"], str)
    frame = functions.sql("SELECT 'a text' AS text").select(pm_extract("text", ["who", "where"]).alias("e"))
    assert frame.schema["e"].dataType == DataType.fromDDL("STRUCT<who: STRING, where: STRING>")
    assert frame.head()["e"]["who"] == row["e"]["who"]


def test_python_extracts_a_struct_of_the_type_asked_for(functions: Any) -> None:
    ddl = (
        "STRUCT<label: STRING, count: INT, price: DECIMAL(10,2), day: DATE, lines: ARRAY<STRUCT<n: BIGINT>>>"
    )
    frame = functions.sql("SELECT 'a text' AS text").select(pm_extract("text", ddl).alias("e"))
    assert frame.schema["e"].dataType == DataType.fromDDL(ddl)
    answer = frame.head()["e"]
    assert isinstance(answer["price"], Decimal)
    assert answer["day"].month == 1
    assert answer["lines"][0]["n"] >= 0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ("pm_classify('a', array('one'))", "labels: choice has only 'one'"),
        ("pm_classify('a', array('x', 'x'))", "choice has 'x' twice"),
        ("pm_classify('a', 'bug')", "labels of pm_classify are bug; give labels, such as array"),
        ("pm_classify('a', array('x', NULL))", "labels of pm_classify are"),
        (
            "pm_classify('a', array('x', 'y' || id))",
            "labels of pm_classify differ between rows: x, y0 and x, y1",
        ),
        ("pm_classify(1, array('x', 'y'))", "the first argument is of the type int"),
        ("pm_classify('a')", "pm_classify takes a text and labels.*it was given 1 columns"),
        ("pm_extract('a', 'name STRING')", "the schema of pm_extract is name STRING.*give a schema"),
        ("pm_extract('a', '{\"type\": \"string\"}')", "not that of an object with properties"),
        ("pm_extract('a', array('n', 'n'))", "has the name 'n' twice"),
        (
            'pm_extract(\'a\', \'{"type": "object", "properties": {"a": {"type": "unknown"}}}\')',
            "refused the row",
        ),
    ],
)
def test_a_wrong_argument_in_sql_fails_the_query_with_its_name(
    functions: Any, call: str, message: str
) -> None:
    with pytest.raises(Exception, match=message):
        functions.sql(f"SELECT {call} AS a FROM range(0, 2, 1, 1)").collect()


def test_a_wrong_argument_in_python_is_refused_where_it_is_given(functions: Any) -> None:
    for labels, message in [
        ("bug", "labels is a str"),
        (["one"], "has only 'one'"),
        ([1, 2], "labels of pm_class"),
    ]:
        with pytest.raises(JobError, match=message):
            pm_classify("text", labels)  # type: ignore[arg-type]
    for schema, message in [
        ("STRUCT<a", "neither a JSON schema nor a Spark type"),
        ("STRING", "of an object"),
        ([], "schema of pm_extract"),
    ]:
        with pytest.raises(JobError, match=message):
            pm_extract("text", schema)


def test_a_failed_row_is_null_or_fails_the_query(registered: Callable[..., Any]) -> None:
    query = "SELECT pm_classify(text, array('x', 'y')) AS a FROM VALUES ('fine'), (NULL), ('[[error]]') AS t(text)"
    answers = [row["a"] for row in registered(classify_template="{text}{labels}").sql(query).collect()]
    assert answers[0] in ("x", "y")
    assert answers[1:] == [None, None]
    failing = registered(classify_template="{text}{labels}", on_error="fail")
    with pytest.raises(Exception, match="pm_classify: a row failed with engine_error"):
        failing.sql(query).collect()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"choice": ["a", "b"]}, r"choice is given to register_functions\(\)"),
        ({"classify_template": "{text}"}, "classify_template must hold {labels}"),
        ({"extract_template": "{schema}"}, "extract_template must hold {text} once"),
        ({"on_error": "skip"}, "on-error is 'skip'"),
    ],
)
def test_a_wrong_option_is_refused_before_any_row(spark: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(JobError, match=message):
        register_functions(spark, engine=fake_config(model="udf"), **options)


def test_a_session_without_the_functions_says_what_to_call(spark: Any) -> None:
    for kind in Kind:
        spark.sql(f"DROP TEMPORARY FUNCTION IF EXISTS {kind.value}")
    with pytest.raises(JobError, match="call register_functions"):
        pm_classify("text", LABELS)
