"""Inputs that are different each time they are read: found by the plan, refused where rows are matched by them."""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

from pipemax_spark.errors import JobError
from pipemax_spark.request.prompts import PromptSource
from pipemax_spark.rows.volatile import MOMENT, RANDOM, STEADY, VolatileQuery
from tests.fakes.settings import expected_text
from tests.spark.conftest import Jobs

SAME_IN_LIKE_SESSIONS = {"CurrentCatalog", "CurrentDatabase", "CurrentPath", "CurrentTimeZone"}
"""What depends on how the session is set up, and on nothing else."""


@pytest.fixture(scope="module", autouse=True)
def words(spark: Any) -> Iterator[None]:
    rows = spark.range(4).selectExpr(
        "id", "id + 1 AS n", "concat('word ', id) AS text", "current_date() AS day"
    )
    rows.write.saveAsTable("volatile_words")
    yield
    spark.sql("DROP TABLE volatile_words")


def volatile(spark: Any, query: str) -> tuple[dict[str, str], str | None]:
    """The columns with the expression that makes each volatile, and what selects rows."""
    found = VolatileQuery(spark.sql(query.format(t="volatile_words")))
    selecting = found.selecting()
    return {name: each.sql for name, each in found.columns().items()}, selecting and selecting.sql


RANDOM_CALLS = {
    "uuid()": "uuid()",
    "rand()": "rand()",
    "rand(3)": "rand()",
    "random()": "rand()",
    "randn()": "randn()",
    "randstr(5)": "randstr()",
    "uniform(1, 5)": "uniform()",
    "shuffle(array(1, 2))": "shuffle()",
    "monotonically_increasing_id()": "monotonically_increasing_id()",
    "spark_partition_id()": "spark_partition_id()",
    "input_file_block_start()": "input_file_block_start()",
    "reflect('java.util.UUID', 'randomUUID')": "reflect()",
    "try_reflect('java.util.UUID', 'randomUUID')": "reflect()",
    "aes_encrypt(text, '0000111122223333')": "aes_encrypt()",
    "aes_encrypt(text, '0000111122223333', 'CBC')": "aes_encrypt()",
    "named_struct('made', uuid(), 'text', text)": "uuid()",
    "transform(array(1, 2), x -> x + rand())": "rand()",
    "(SELECT max(n) FROM (SELECT rand() AS n FROM volatile_words))": "rand()",
}
MOMENT_CALLS = {
    "current_timestamp()": "current_timestamp()",
    "now()": "now()",
    "localtimestamp()": "localtimestamp()",
    "current_date": "current_date()",
    "curdate()": "current_date()",
    "unix_timestamp()": "current_timestamp()",
    "datediff(current_date(), day)": "current_date()",
    "cast('now' AS timestamp)": "CAST('now' AS TIMESTAMP)",
    "to_date('today')": "to_date('today')",
    "to_timestamp(' Now')": "to_timestamp(' Now')",
    "date('tomorrow')": "CAST('tomorrow' AS DATE)",
    "current_user()": "current_user()",
    "session_user()": "current_user()",
    "user": "current_user()",
}
STEADY_CALLS = (
    "upper(text)",
    "input_file_name()",
    "current_timezone()",
    "current_database()",
    "cast('2026-01-01' AS date)",
    "cast('now' AS string)",
    "aes_encrypt(text, '0000111122223333', 'ECB')",
    "aes_encrypt(text, '0000111122223333', 'CBC', 'DEFAULT', unhex('00000000000000000000000000000000'))",
    "row_number() OVER (ORDER BY text)",
    "(SELECT collect_list(text) FROM volatile_words)",
    "(SELECT first(text) FROM volatile_words)",
)


@pytest.mark.parametrize(("call", "told"), [*RANDOM_CALLS.items(), *MOMENT_CALLS.items()])
def test_a_value_that_is_another_one_each_time_is_found(spark: Any, call: str, told: str) -> None:
    assert volatile(spark, f"SELECT id, {call} AS made FROM {{t}}") == ({"made": told}, None)


@pytest.mark.parametrize("call", ["uuid()", "current_timestamp()"])
def test_such_a_value_is_found_wherever_the_query_makes_it(spark: Any, call: str) -> None:
    made = f"SELECT id, {call} AS made FROM {{t}}"
    for query, column in (
        (f"SELECT id, struct(made) AS again FROM ({made}) WHERE id > 0", "again"),
        (f"WITH q AS ({made}) SELECT a.id, b.made AS again FROM q a JOIN q b ON a.id = b.id", "again"),
        (f"SELECT id, made FROM ({made}) UNION ALL SELECT id, made FROM ({made})", "made"),
    ):
        assert volatile(spark, query)[0] == {column: call}, query
    assert volatile(spark, f"SELECT id FROM ({made})") == ({}, None), "a column that no one sees"


@pytest.mark.parametrize("call", STEADY_CALLS)
def test_a_value_that_stays_the_same_is_not_taken_for_another(spark: Any, call: str) -> None:
    assert volatile(spark, f"SELECT id, {call} AS made FROM {{t}}") == ({}, None)


@pytest.mark.parametrize(
    ("query", "columns", "selecting"),
    [
        ("SELECT id FROM {t} WHERE rand() < 0.5", {}, "rand()"),
        ("SELECT id FROM {t} WHERE id IN (SELECT id FROM {t} WHERE rand() < 0.5)", {}, "rand()"),
        ("SELECT id FROM {t} ORDER BY rand() LIMIT 2", {}, "rand()"),
        ("SELECT id FROM {t} ORDER BY rand()", {}, None),
        (
            "SELECT id FROM (SELECT id, row_number() OVER (ORDER BY rand()) AS place FROM {t}) WHERE place < 3",
            {},
            "rand()",
        ),
        ("SELECT floor(rand() * 2) AS part, count(*) AS n FROM {t} GROUP BY 1", {"part": "rand()"}, "rand()"),
        (
            "SELECT id, made FROM {t} LATERAL VIEW explode(array(uuid(), text)) AS made",
            {"made": "uuid()"},
            "uuid()",
        ),
        (
            "SELECT uuid() AS u, id, part FROM {t} LATERAL VIEW explode(array(text)) AS part",
            {"u": "uuid()"},
            None,
        ),
        ("SELECT DISTINCT text, uuid() AS u FROM {t}", {"u": "uuid()"}, None),
        (
            "WITH RECURSIVE r(n, u) AS (SELECT 1, uuid() UNION ALL SELECT n + 1, u FROM r WHERE n < 3) SELECT * FROM r",
            {"u": "uuid()"},
            None,
        ),
        # The present time decides which rows there are, not what they hold.
        ("SELECT id FROM {t} WHERE day = current_date()", {}, None),
        ("SELECT id FROM {t} WHERE id < (SELECT max(unix_timestamp()) FROM {t})", {}, None),
        ("SELECT text, count(*) AS n FROM {t} WHERE day > current_date() - 7 GROUP BY text", {}, None),
        ("SELECT text, n, grouping(text) AS g FROM {t} GROUP BY CUBE (text, n)", {}, None),
        ("SELECT * FROM (SELECT n, text FROM {t}) PIVOT (sum(n) FOR text IN ('word 1' AS one))", {}, None),
    ],
)
def test_what_selects_rows_is_told_apart_from_what_they_hold(
    spark: Any, query: str, columns: dict[str, str], selecting: str | None
) -> None:
    assert volatile(spark, query) == (columns, selecting)


def test_functions_of_users_are_taken_at_their_word_and_functions_of_whole_rows_pass_everything_on(
    spark: Any,
) -> None:
    from pyspark.sql import functions as F  # noqa: N812

    plain = F.udf(lambda text: text)
    drawn = F.udf(lambda text: text).asNondeterministic()
    rows = spark.table("volatile_words").select(
        plain("text").alias("plain"), plain(drawn("text")).alias("drawn")
    )
    assert list(VolatileQuery(rows).columns()) == ["drawn"]
    made = (
        spark.table("volatile_words")
        .selectExpr("id", "uuid() AS u")
        .mapInArrow(lambda rows: rows, "i long, u string")
    )
    assert list(VolatileQuery(made).columns()) == ["i", "u"]
    spark.sql("CREATE TEMPORARY FUNCTION drawn_in_sql() RETURNS string RETURN uuid()")
    try:
        assert volatile(spark, "SELECT id, drawn_in_sql() AS u FROM {t}") == ({"u": "uuid()"}, None)
    finally:
        spark.sql("DROP TEMPORARY FUNCTION drawn_in_sql")


def test_the_list_has_each_function_of_spark_that_is_volatile(spark: Any) -> None:
    """By Spark's own marks of expression classes, and of the expressions that take no argument."""
    registry = spark._jsparkSession.sessionState().functionRegistry()
    load = spark._jvm.java.lang.Thread.currentThread().getContextClassLoader().loadClass
    package = "org.apache.spark.sql.catalyst.expressions."
    marks = [load(f"{package}{mark}") for mark in ("Nondeterministic", "ExpressionWithRandomSeed")]
    current = spark._jvm.org.apache.spark.sql.catalyst.trees.TreePattern.CURRENT_LIKE()
    names, found = registry.listFunction(), set()

    def note(made: Any) -> bool:
        """Note the innermost parts that are marked."""
        parts = [note(made.children().apply(place)) for place in range(made.children().size())]
        is_marked = not made.deterministic() or made.containsPattern(current)
        if is_marked and not any(parts):
            found.add(made.getClass().getSimpleName())
        return bool(is_marked)

    for name in (names.apply(place) for place in range(names.size())):
        kind_name = registry.lookupFunction(name).get().getClassName()
        if not kind_name.startswith("org.apache.spark.sql.catalyst."):
            continue  # a function that another test has registered
        kind = load(kind_name)
        if any(mark.isAssignableFrom(kind) for mark in marks):
            found.add(kind.getSimpleName())
        else:
            with contextlib.suppress(Exception):  # it takes arguments
                note(registry.lookupFunction(name, names.take(0)))
    assert {"Uuid", "Rand", "CurrentTimestamp", "CurrentUser"} <= found
    assert found <= RANDOM.keys() | MOMENT.keys() | STEADY | SAME_IN_LIKE_SESSIONS


def test_a_job_refuses_rows_that_are_other_ones_each_time_and_takes_ids_that_stay(run: Jobs) -> None:
    run.spark.sql(
        "CREATE OR REPLACE TEMP VIEW ever_new AS SELECT uuid() AS u, id, text, current_date() AS loaded, "
        "named_struct('max_tokens', int(rand() * 8) + 1) AS own FROM volatile_words WHERE day <= current_date()"
    )
    by_time = PromptSource(template="On {loaded}: {text}")
    for options, told in (
        (
            {},
            r"column 'u' of input 'ever_new' is made by uuid\(\).*Give --id-columns without it, or write the view",
        ),
        (
            {"id_columns": ("u",)},
            r"column 'u' .* is an id column, and it is made by uuid\(\).*write the view's rows",
        ),
        (
            {"id_columns": ("id",), "source": by_time},
            r"'loaded' .* goes into the requests.*by current_date\(\)",
        ),
        ({"id_columns": ("id",), "overrides_column": "own"}, r"'own' .* goes into the requests.*by rand\(\)"),
        (
            {"id_columns": ("id",), "where": "u > '8'"},
            r"--where \"u > '8'\" selects different rows .*uuid\(\)",
        ),
    ):
        with pytest.raises(JobError, match=told):
            run.run(input="ever_new", **options)
    assert "Spark " not in run.printed, "the line before engines start"
    for expected in (4, 0):
        summary = run.run(input="ever_new", id_columns=("id",))
        assert summary.rows_out == expected
    assert {row["id"]: row["annotation"]["text"] for row in run.rows()} == {
        i: expected_text(f"Say word {i}", 16) for i in range(4)
    }
