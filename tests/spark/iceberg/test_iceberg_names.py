"""Columns of any name that Spark accepts, in Iceberg tables, and names that Iceberg cannot tell apart."""

from collections.abc import Iterator
from typing import Any

import pytest

from pipemax_spark.errors import JobError
from pipemax_spark.request.prompts import PromptSource
from pipemax_spark.spark.sql import quoted
from pipemax_spark.storage.iceberg import IcebergTable
from tests.fakes.settings import expected_text
from tests.spark.iceberg.conftest import IcebergJobs
from tests.spark.test_names import NAMES, SCHEMA, put, row

pytestmark = pytest.mark.iceberg


# Iceberg has no table with a column of this name next to the struct that it seems to be a field of.
CARRIED = tuple(name for name in NAMES if name != "annotation.text")


@pytest.fixture(params=["one case", "either case"])
def columns(request: pytest.FixtureRequest, spark: Any) -> Iterator[str]:
    """Columns that are one to Iceberg, or one if case does not matter."""
    if request.param == "one case":
        yield "1 AS `a.b`, named_struct('b', 'x') AS a"
        return
    spark.conf.set("spark.sql.caseSensitive", "true")
    yield "'one' AS a, 'two' AS A"
    spark.conf.unset("spark.sql.caseSensitive")


def test_every_name_is_carried_over_from_an_iceberg_input_to_an_iceberg_output(
    run: IcebergJobs, catalog: str
) -> None:
    source = f"{catalog}.db.odd_names"
    put(run, [row(0), row(1), row(1), row(2, **{"c`d": None})])
    run.spark.sql(f"DROP TABLE IF EXISTS {source}")
    run.spark.table("odd_names").drop("annotation.text").writeTo(source).create()
    options = {
        "input": source,
        "source": PromptSource(template="".join(f"{{{quoted(name)}}} " for name in CARRIED)),
        "max_error_rate": 1.0,
    }
    done = [run.run(**options, **more) for more in ({}, {}, {"retry_errors": True})]
    assert [(each.rows_out, each.rows_skipped) for each in done] == [(4, 0), (0, 4), (1, 3)]
    rows = run.rows()
    assert sorted(found["id"] for found in rows) == [0, 1, 1, 2]
    for found in rows:
        number = found["id"]
        expected = dict(zip(SCHEMA.names, row(number, **({"c`d": None} if number == 2 else {})), strict=True))
        annotation = found.pop("annotation")
        expected.pop("annotation.text")
        assert found == expected | {"in.ner": dict(zip(NAMES, expected["in.ner"], strict=True))}
        assert annotation["text"] == (
            None if number == 2 else expected_text("".join(f"{name} {number} " for name in CARRIED), 16)
        )
    run.spark.sql(f"DROP TABLE {source}")


def test_every_name_can_be_an_id_or_be_selected_and_changed_rows_are_done_again(
    run: IcebergJobs,
) -> None:
    ids = CARRIED[:-8]
    put(run, [row(0), row(1)])
    options = {
        "input": "odd_names",
        "id_columns": ids,
        "select": ("id", *ids, "__pipemax_times", "in.ner"),
        "source": PromptSource(template="Say {in.ner.a.b} {__pipemax_times}"),
    }
    run.run(**options)
    put(run, [row(0), row(1, __pipemax_times="changed"), row(2)])
    done = [run.run(**options, redo_changed=again) for again in (True, False)]
    assert [(each.rows_out, each.rows_skipped) for each in done] == [(2, 1), (0, 3)]
    assert {found["id"]: found["annotation"]["text"] for found in run.rows()} == {
        number: expected_text(f"Say a.b of {number} {times}", 16)
        for number, times in ((0, "__pipemax_times 0"), (1, "changed"), (2, "__pipemax_times 2"))
    }


@pytest.mark.parametrize("column", ["p.q", "a`b", "a b", 'say "x"', "Größe", " ", "l\nf", "🙂", "%2F/="])
def test_a_table_may_be_partitioned_by_any_name(run: IcebergJobs, column: str) -> None:
    frame = run.spark.createDataFrame([(0, "a"), (1, "b"), (2, "a")], "id long, text string")
    frame.withColumnRenamed("text", column).createOrReplaceTempView("odd_names")
    quoted = "`" + column.replace("`", "``") + "`"
    run.spark.sql(
        f"CREATE TABLE {run.output} (id BIGINT, {quoted} STRING) USING iceberg PARTITIONED BY ({quoted})"
    )
    options = {"input": "odd_names", "source": PromptSource(template=f"Say {{{quoted}}}")}
    done = [run.run(**options) for _ in range(2)]
    assert [(each.rows_out, each.rows_skipped) for each in done] == [(3, 0), (0, 3)]
    assert sorted((found["id"], found[column]) for found in run.rows()) == [(0, "a"), (1, "b"), (2, "a")]


def test_names_that_iceberg_cannot_tell_apart_are_kept_or_refused_before_the_output_is_made(
    run: IcebergJobs, columns: str
) -> None:
    run.spark.sql(f"SELECT id, concat('word ', id) AS text, {columns} FROM range(3)").createOrReplaceTempView(
        "twins"
    )
    wanted = run.spark.table("twins").collect()
    said = ""
    try:
        run.run(input="twins", id_columns=("id",))
    except JobError as error:
        said = str(error)
    if said:
        assert "cannot be created" in said
        assert not IcebergTable(run.spark, run.output).exists()
        return
    assert run.run(input="twins", id_columns=("id",)).rows_out == 0
    kept = IcebergTable(run.spark, run.output).read().drop("annotation").orderBy("id").collect()
    assert list(map(tuple, kept)) == list(map(tuple, wanted))
