"""A run that dies after it has prepared: the next one does what is left of the rows that it had written down."""

import re
import shutil
import threading
from collections import Counter
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipemax_spark.rows.remaining import rows_where
from pipemax_spark.rows.written_rows import rows_hash
from pipemax_spark.storage.sources import read_source
from pipemax_spark.storage.tables import DeltaTable, Transaction
from tests.fakes.settings import expected_text
from tests.spark.conftest import Jobs
from tests.spark.spark_work import Work, counted
from tests.waiting import wait_until

NUM_ROWS = 3_000


@pytest.fixture(autouse=True)
def chunk_of_each_slice(monkeypatch: pytest.MonkeyPatch) -> None:
    """However fast the engine is, and however much it takes: eight chunks of some 375 rows."""
    monkeypatch.setattr("pipemax_spark.spark.slots.Slots.fed_partition_rows", lambda slots, engine_rows: None)
    monkeypatch.setattr("pipemax_spark.rows.chunks._MIN_FIRST_ROWS_PER_SLOT", 1)


class DyingTable(DeltaTable):
    """A table at whose commit of chunk ``dies_at`` the run fails, with all rows of the chunk completed.

    The chunk before it is committed first. Without ``completes``, no row of it or of later ones is completed.
    """

    def __init__(self, spark: Any, name: str, *, dies_at: int, completes: bool = True) -> None:
        super().__init__(spark, name)
        self._dies_at = dies_at
        self._completes = completes
        self._before_is_committed = threading.Event()

    def append(self, rows: Any, transaction: Transaction) -> None:
        found = re.match(r"pipemax run \S+ chunk (\d+)", transaction.note)
        number = int(found[1]) if found else -1
        if number >= self._dies_at and not self._completes:
            raise RuntimeError("the run dies")
        if number == self._dies_at:
            rows.write.format("noop").mode("overwrite").save()
            wait_until(self._before_is_committed.is_set, 120, "the chunk before is committed")
            raise RuntimeError("the run dies")
        super().append(rows, transaction)
        if number == self._dies_at - 1:
            self._before_is_committed.set()


def read_delta(run: Jobs, **changes: Any) -> None:
    """Have jobs read a Delta table with ids that are unique and texts that are not."""
    run.defaults = replace(
        run.defaults,
        input=str(run.directory / "in"),
        commit_every=timedelta(milliseconds=1),
        **changes,
    )
    rows = run.spark.range(NUM_ROWS, numPartitions=2).selectExpr("id", "concat('word ', id % 900) AS text")
    rows.write.format("delta").save(run.defaults.input)


def die(run: Jobs, *, at: int = 1) -> str:
    """Run the job until it has committed its first chunks and completed the next one; return what it printed."""
    with pytest.raises(RuntimeError, match="the run dies"):
        run.run(table=DyingTable(run.spark, run.output, dies_at=at))
    return run.printed


def answers(run: Jobs) -> Counter[tuple[int, str]]:
    rows = run.rows()
    assert all(row["annotation"]["text"] == expected_text(f"Say {row['text']}", 16) for row in rows)
    return Counter((row["id"], row["text"]) for row in rows)


def searches(work: Work) -> int:
    """How many queries have compared rows with those that the output holds under the spec."""
    return sum("spec_hash" in plan and ("LeftAnti" in plan or "Window" in plan) for plan in work.plans)


EVERY_ROW_ONCE = Counter((number, f"word {number % 900}") for number in range(NUM_ROWS))


@pytest.mark.long
@pytest.mark.parametrize(("id_columns", "by_prefix"), [(("id",), False), ((), True)])
def test_runs_that_die_one_after_the_other_prepare_once(
    run: Jobs, id_columns: tuple[str, ...], by_prefix: bool
) -> None:
    read_delta(run, id_columns=id_columns, group_by_prefix=by_prefix)
    assert "Resume" not in die(run)
    done = len(run.rows())
    assert 0 < done < NUM_ROWS, "one chunk is committed"
    run.spark.sql(f"OPTIMIZE delta.`{run.output}`")  # changes no row
    assert f"{NUM_ROWS - done:,} of the rows that run" in die(run, at=2)
    done_by_two = len(run.rows())
    assert done < done_by_two < NUM_ROWS, "the first run's completions and a chunk are committed"

    with counted(run.spark) as work:
        summary = run.run()
    assert summary is not None
    assert f"{NUM_ROWS - done_by_two:,} of the rows that run" in run.printed
    assert "had completed were committed now" in run.printed
    assert not searches(work)
    assert answers(run) == EVERY_ROW_ONCE
    assert summary.rows_skipped + summary.rows_out == NUM_ROWS
    assert not Path(run.output, "_pipemax").exists(), "nothing is left of the dead runs"


@pytest.mark.long  # speed
def test_rows_that_nobody_has_begun_are_counted_once(run: Jobs) -> None:
    read_delta(run, id_columns=("id",))
    with pytest.raises(RuntimeError, match="the run dies"):
        run.run(table=DyingTable(run.spark, run.output, dies_at=0, completes=False))
    with counted(run.spark) as work:
        run.run()
    assert f"{NUM_ROWS:,} of the rows that run" in run.printed
    assert work.plans_with("max(__pipemax_rank") == 1
    assert answers(run) == EVERY_ROW_ONCE


@pytest.mark.long  # a variant of the deaths above
def test_a_run_searches_again_for_rows_left_if_others_changed_the_output(run: Jobs) -> None:
    read_delta(run, id_columns=("id",), compute_each=True)  # equal rows may lie apart
    die(run)
    output = run.spark.read.format("delta").load(run.output)
    done = {row["id"] for row in output.select("id").collect()}
    run.spark.sql(f"DELETE FROM delta.`{run.output}` WHERE id = {min(done)}")
    another = next(
        (old, new) for old in done for new in range(NUM_ROWS) if new not in done and (new - old) % 900 == 0
    )
    row = output.where(f"id = {another[0]}").selectExpr(f"{another[1]}L AS id", "text", "annotation")
    row.write.format("delta").mode("append").save(run.output)

    with counted(run.spark) as work:
        summary = run.run()
    assert summary is not None
    assert summary.rows_reused == 0, "each of the equal rows is computed"
    assert "had prepared are left" not in run.printed
    assert searches(work)
    assert answers(run) == EVERY_ROW_ONCE


@pytest.mark.long  # as if others changed the output, above
def test_a_run_searches_again_for_rows_left_if_prepared_rows_are_lost(run: Jobs) -> None:
    read_delta(run, id_columns=("id",))
    die(run)
    slices = sorted(Path(run.output, "_pipemax").glob("*/*/rows/0/slices/__pipemax_slice=*"))
    shutil.rmtree(slices[-1])
    run.run()
    assert "had prepared were lost" in run.printed
    assert answers(run) == EVERY_ROW_ONCE


def which(run: Jobs, **changes: Any) -> str | None:
    """What a run with these options would find, by its hash."""
    options = replace(run.defaults, **changes)
    source = read_source(run.spark, options.input)
    source = replace(source, rows=rows_where(source.rows, options.where))
    checked: Any = SimpleNamespace(source=source, spec=SimpleNamespace(hash="hash"), id_columns=("id",))
    return rows_hash(options, checked)


def test_another_input_or_other_options_are_other_rows(run: Jobs) -> None:
    read_delta(run)
    first = which(run)
    assert first is not None
    assert which(run) == first
    assert which(run, where="id < 2990") != first
    assert which(run, group_by_prefix=True) != first
    assert which(run, limit=10) is None
    shutil.rmtree(run.defaults.input)
    run.spark.range(NUM_ROWS).selectExpr("id", "'other' AS text").write.format("delta").save(
        run.defaults.input
    )
    other = which(run)
    assert other not in (None, first), "a table of the same name, schema and version"
    run.spark.range(1).selectExpr("id", "'more' AS text").write.format("delta").mode("append").save(
        run.defaults.input
    )
    assert which(run) not in (None, first, other)


CONDITIONS = {
    "id < 20": True,
    "current_date() > DATE '2020-01-01'": True,
    "timestamp_seconds(id) < current_timestamp()": False,
    "id NOT IN (SELECT id FROM elsewhere)": None,
    "id < (SELECT max(id) FROM elsewhere)": None,
}
"""Whether two runs find the same rows; None: no run can tell."""


def test_rows_of_a_condition_are_the_same_only_if_it_means_the_same(run: Jobs) -> None:
    read_delta(run)
    run.spark.range(10).createOrReplaceTempView("elsewhere")
    found = {where: [which(run, where=where) for _ in range(2)] for where in CONDITIONS}
    assert {
        where: None if None in both else both[0] == both[1] for where, both in found.items()
    } == CONDITIONS
