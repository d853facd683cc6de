"""The most important rows first: slices are ranges of the order, and an early end leaves out the last rows."""

import itertools
import re
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import functions as F  # noqa: N812

from pipemax_spark.errors import JobError
from pipemax_spark.options import JobOptions
from pipemax_spark.request.columns import RequestColumns
from pipemax_spark.request.prompts import PromptSource
from pipemax_spark.rows.chunks import Chunk, SlicedRows, write_slices
from pipemax_spark.rows.order_by import check_order, order_of
from pipemax_spark.storage.tables import DeltaTable, Transaction
from tests.fakes.settings import expected_text
from tests.spark.conftest import Jobs
from tests.spark.test_written_rows import chunk_of_each_slice  # noqa: F401  a fixture
from tests.waiting import wait_until

SLICES = 6
# A third has no priority, a third the same one, and the rest, NaN among them, one of their own.
PRIORITY = (
    "CASE WHEN id % 3 = 0 THEN NULL WHEN id % 3 = 1 THEN 7.0D WHEN id % 100 = 2 THEN double('NaN') "
    "ELSE double(id * 7919 % 1000) END"
)


def some_rows(spark: Any) -> Any:
    return spark.range(3_000, numPartitions=3).selectExpr(
        "id", f"{PRIORITY} AS priority", "concat('text ', id % 700) AS text"
    )


def sliced(spark: Any, path: Path, rows: Any, order_by: str, **options: Any) -> SlicedRows:
    keyed = RequestColumns(PromptSource(prompt_column="text")).add_with_keys(rows)
    order = order_of(spark, order_by)
    given = {"identity": F.col("__pipemax_key"), "slices": SLICES, "slots": 2, "equal_together": True}
    span = write_slices(keyed, str(path), order=order, **{**given, **options})
    return SlicedRows(spark, [span], rows.schema)


def in_slices(rows: SlicedRows) -> list[list[Any]]:
    chunks = [Chunk(number=n, first_slice=n, end_slice=n + 1, rows=rows.slice_rows[n]) for n in range(SLICES)]
    return [rows.read(chunk, partitions=2).collect() for chunk in chunks]


@pytest.mark.parametrize(
    ("order_by", "sort_key"),
    [
        ("priority DESC", lambda row: (row["priority"] is None, -_number(row["priority"]))),
        ("priority", lambda row: (row["priority"] is None, _number(row["priority"]))),
        ("id % 2, length(text) DESC", lambda row: (row["id"] % 2, -len(row["text"]))),
    ],
)
def test_slices_are_ranges_of_the_order_with_nulls_last_and_equal_values_are_cut(
    spark: Any, tmp_path: Path, order_by: str, sort_key: Any
) -> None:
    found = in_slices(sliced(spark, tmp_path / "rows", some_rows(spark), order_by))
    assert sorted(row["id"] for part in found for row in part) == list(range(3_000))
    for before, after in itertools.pairwise(found):
        assert max(map(sort_key, before)) <= min(map(sort_key, after))
    sizes = [len(part) for part in found]
    assert max(sizes) < 2 * 3_000 / SLICES, "also where a third of the rows are equal"


def _number(value: float | None) -> float:
    """NaN is the largest, as in Spark."""
    return 0.0 if value is None else float("inf") if value != value else value


def test_a_row_s_slice_in_an_order_does_not_depend_on_how_rows_come(spark: Any, tmp_path: Path) -> None:
    rows = some_rows(spark).where("id < 1500")  # so few that all are in Spark's sample for the bounds
    shuffled = rows.orderBy(F.rand(1)).repartition(5)
    places = [
        {row["id"]: number for number, part in enumerate(in_slices(made)) for row in part}
        for made in (
            sliced(spark, tmp_path / str(place), some, "priority DESC")
            for place, some in enumerate((rows.repartition(3), shuffled))
        )
    ]
    assert places[0] == places[1]
    assert len(set(places[0].values())) == SLICES


def test_equal_requests_of_a_slice_go_to_one_task(spark: Any, tmp_path: Path) -> None:
    rows = sliced(spark, tmp_path / "rows", some_rows(spark), "id % 3")
    chunk = Chunk(number=0, first_slice=0, end_slice=1, rows=rows.slice_rows[0])
    part = rows.read(chunk, partitions=4)
    placed = part.select("text", F.spark_partition_id()).distinct().collect()
    assert len({task for _, task in placed}) == 4
    assert len(placed) == len({text for text, _ in placed}) < chunk.rows


@pytest.mark.parametrize(
    ("order_by", "message"),
    [
        ("prio DESC", "`prio` cannot be resolved. Did you mean"),
        ("tags", "does not support ordering on type"),
        ("rand()", "has another value each time that it is read, by rand()"),
        ("noise DESC", "noise has another value each time that it is read, by rand()"),
        ("'high'", "is the same for all rows; name a column"),
        ("row_number() OVER (ORDER BY id)", "make it a column of a view"),
        ("(SELECT max(id) FROM input)", "make it a column of a view"),
        ("priority LIMIT 5", "holds more than an order"),
        ("priority NULLS FIRST", "leave NULLS FIRST out"),
        ("priority DEC TO", "is not an order: [PARSE_SYNTAX_ERROR]"),
    ],
)
def test_what_is_no_order_of_the_rows_is_refused_by_name(spark: Any, order_by: str, message: str) -> None:
    rows = some_rows(spark).selectExpr("*", "map('a', 1) AS tags", "rand(1) AS noise")
    with pytest.raises(JobError) as refused:
        check_order(rows, order_by, name="packages")
    assert message in str(refused.value)
    check_order(rows, "priority DESC, length(text), `id`", name="packages")


def test_two_orders_of_the_same_rows_are_refused(run: Jobs) -> None:
    with pytest.raises(JobError, match="--order-by and --group-by-prefix"):
        _ = replace(run.defaults, order_by="id", group_by_prefix=True)


class StoppedTable(DeltaTable):
    """A table that commits the chunks before ``stops_at`` and fails at all others, once their rows are completed."""

    def __init__(self, spark: Any, name: str, *, stops_at: int) -> None:
        super().__init__(spark, name)
        self._stops_at = stops_at
        self._committed: set[int] = set()

    def append(self, rows: Any, transaction: Transaction) -> None:
        found = re.match(r"pipemax run \S+ chunk (\d+)", transaction.note)
        if found is None or int(found[1]) < self._stops_at:
            super().append(rows, transaction)
            self._committed |= {int(found[1])} if found else set()
            return
        rows.write.format("noop").mode("overwrite").save()
        wait_until(lambda: self._stops_at - 1 in self._committed, 120, "the chunk before is committed")
        raise RuntimeError("the run dies")


def by_priority(run: Jobs, **changes: Any) -> JobOptions:
    """Have jobs read 3,000 rows of a Delta table whose priority is the reverse of the id."""
    changes = {"id_columns": ("id",), "order_by": "priority DESC", **changes}
    run.defaults = replace(
        run.defaults, input=str(run.directory / "in"), commit_every=timedelta(milliseconds=1), **changes
    )
    rows = run.spark.range(3_000, numPartitions=2).selectExpr(
        "id", "3000 - id AS priority", "concat('word ', id % 900) AS text"
    )
    rows.write.format("delta").save(run.defaults.input)
    return run.defaults


@pytest.mark.long  # two runs
def test_a_run_that_dies_has_committed_the_first_rows_of_the_order_and_the_next_does_the_rest(
    run: Jobs,
) -> None:
    by_priority(run)
    with pytest.raises(RuntimeError, match="the run dies"):
        run.run(table=StoppedTable(run.spark, run.output, stops_at=2))
    done = sorted(row["id"] for row in run.rows())
    assert 0 < len(done) < 3_000
    assert done == list(range(len(done))), "a prefix by priority"
    last = run.run()
    assert "this run uses them as they are" in run.printed
    assert last.rows_out + last.rows_skipped == 3_000
    rows = run.rows()
    assert sorted(row["id"] for row in rows) == list(range(3_000))
    assert all(row["annotation"]["text"] == expected_text(f"Say {row['text']}", 16) for row in rows)


@pytest.mark.long  # two runs
def test_after_a_death_another_order_holds_for_the_rows_that_are_left(run: Jobs) -> None:
    by_priority(run)
    with pytest.raises(RuntimeError, match="the run dies"):
        run.run(table=StoppedTable(run.spark, run.output, stops_at=1))
    with pytest.raises(RuntimeError, match="the run dies"):
        run.run(table=StoppedTable(run.spark, run.output, stops_at=3), order_by="priority")
    assert "Resume" not in run.printed
    run_ids = {row["id"]: row["annotation"]["run_id"] for row in run.rows()}
    # What the first run had completed bears its id, whoever committed it.
    last = sorted(number for number, run_id in run_ids.items() if run_id != run_ids[0])
    assert last, "the second run has committed rows of its own"
    assert last == list(range(3_000 - len(last), 3_000)), "the least important rows come first now"
    run.run()
    assert sorted(row["id"] for row in run.rows()) == list(range(3_000))


@pytest.mark.long  # the order is in the run that dies
def test_a_limit_takes_the_first_rows_of_the_order(run: Jobs) -> None:
    run.write_input([(number, f"word {number}") for number in range(200)])
    for place in (1, 2):
        summary = run.run(id_columns=("id",), order_by="id % 10 DESC, id", limit=10)
        assert (summary.rows_out, summary.rows_left) == (10, 200 - 10 * place)
        nines = [number for number in range(200) if number % 10 == 9]
        assert sorted(row["id"] for row in run.rows()) == nines[: 10 * place]


def test_an_order_is_checked_before_the_output_is_made(run: Jobs) -> None:
    run.write_input([(1, "a")])
    with pytest.raises(JobError, match="Did you mean"):
        run.run(order_by="priority DESC")
    assert not DeltaTable(run.spark, run.output).exists()
