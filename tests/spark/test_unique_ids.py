"""The ids of an input are compared once: later runs look at appended rows only, and find each duplicate that comes."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from py4j.protocol import Py4JError

from pipemax_spark.errors import JobError
from pipemax_spark.options import JobOptions
from pipemax_spark.rows.remaining import rows_where
from pipemax_spark.rows.unique_ids import check_input_ids
from pipemax_spark.storage.fence import Claim
from pipemax_spark.storage.hadoop import HadoopFiles
from pipemax_spark.storage.sources import read_source
from pipemax_spark.storage.tables import DeltaTable
from tests.spark.conftest import Jobs, Nights, words
from tests.spark.spark_work import Work, counted, set_to

NUM_ROWS = 3_000
FEW = 300
"""Rows that are shuffled where only appended ones are compared; all ids are ten times as many."""


class Checks:
    """Runs that check the ids of one table, and do no more than claim their output."""

    def __init__(self, run: Jobs) -> None:
        self.run = run
        self.input, self.output = str(run.directory / "in"), DeltaTable(run.spark, run.output)
        self.output.create(run.spark.createDataFrame([], "id long").schema)
        self.append(0, NUM_ROWS)

    def append(self, first: int, end: int, *, other: int = 0, **options: str) -> None:
        rows = self.run.spark.range(first, end, numPartitions=1)
        rows = rows.selectExpr("id", f"CAST({other} AS LONG) AS other", "id % 7 AS seventh")
        rows.write.format("delta").mode("append").options(**options).save(self.input)

    def sql(self, statement: str) -> None:
        self.run.spark.sql(statement.format(f"delta.`{self.input}`"))

    def check(self, *ids: str, **options: Any) -> Work:
        """Check the table as a run does, claim the output, and return what Spark did for the check."""
        spark, ids = self.run.spark, ids or ("id",)
        changed: JobOptions = replace(self.run.defaults, input=self.input, id_columns=ids, **options)
        source = read_source(spark, self.input, options=changed.input_option)
        source = replace(source, rows=rows_where(source.rows, changed.where))
        # As where the ids are too many for a broadcast.
        with set_to(spark, {"spark.sql.autoBroadcastJoinThreshold": "-1"}), counted(spark) as work:
            note = check_input_ids(self.output, source, changed, ids)
        Claim.take(self.output, "run", remark=note)
        return work


@pytest.fixture
def checks(run: Jobs) -> Checks:
    return Checks(run)


def test_ids_are_compared_once_and_then_those_of_appended_rows(checks: Checks) -> None:
    assert checks.check().rows_shuffled >= NUM_ROWS
    checks.append(NUM_ROWS, NUM_ROWS + 20)
    checks.sql("OPTIMIZE {}")
    checks.append(NUM_ROWS + 20, NUM_ROWS + 30)
    assert checks.check().rows_shuffled < FEW, "beyond those of the log"
    assert checks.check().rows_shuffled < FEW
    checks.append(NUM_ROWS + 30, NUM_ROWS + 40)
    checks.append(17, 18)
    with pytest.raises(JobError, match=r"ids are not unique: id=17 \(2 rows\)"):
        checks.check()


@pytest.mark.long  # two nights; the test above has the check
def test_a_job_notes_that_ids_are_unique_and_believes_it(nights: Nights) -> None:
    nights.append(words(0, 40))
    nights.run(incremental=False, id_columns=("id",))
    nights.append(words(40, 50))
    with counted(nights.jobs.spark) as work:
        assert nights.run(incremental=False, id_columns=("id",)) == (50, 40, 10)
    counts = [plan for plan in work.plans if "__pipemax_occurrence" in plan]
    assert counts
    assert all("LeftSemi" in plan for plan in counts), "only ids of appended rows are counted"


def twice_among_appended(checks: Checks) -> None:
    checks.append(NUM_ROWS, NUM_ROWS + 1)
    checks.append(NUM_ROWS, NUM_ROWS + 1)
    checks.sql("OPTIMIZE {}")


def merged(checks: Checks) -> None:
    checks.sql(
        "MERGE INTO {} AS t USING (SELECT 5L AS id) AS s ON t.id = -1 WHEN NOT MATCHED THEN INSERT (id) VALUES (5)"
    )


def updated(checks: Checks) -> None:
    checks.sql("UPDATE {} SET id = 1 WHERE id = 0")


def overwritten(checks: Checks) -> None:
    checks.sql("INSERT OVERWRITE {} SELECT 1L AS id, 0L AS other, 0L AS seventh FROM range(2)")


def replaced(checks: Checks) -> None:
    checks.sql("CREATE OR REPLACE TABLE {} USING delta AS SELECT 1L AS id, id AS other FROM range(2)")


def restored(checks: Checks) -> None:
    checks.sql("RESTORE {} TO VERSION AS OF 1")


def made_again(checks: Checks) -> None:
    shutil.rmtree(checks.input)
    checks.append(0, 1)
    checks.append(0, 1)
    checks.append(1, 2)


def put_back(checks: Checks) -> None:
    shutil.rmtree(checks.input)
    shutil.copytree(f"{checks.input} before", checks.input)
    checks.append(1, 2)
    checks.append(NUM_ROWS, NUM_ROWS + 1)


@pytest.mark.long  # the ways in which duplicates come
@pytest.mark.parametrize(
    "bring_duplicates",
    [twice_among_appended, merged, updated, overwritten, replaced, restored, made_again, put_back],
)
def test_duplicates_are_found_however_they_come(
    checks: Checks, bring_duplicates: Callable[[Checks], None]
) -> None:
    if bring_duplicates is restored:
        checks.append(7, 8)
        checks.sql("DELETE FROM {} WHERE id = 7")
    shutil.copytree(checks.input, f"{checks.input} before")
    checks.append(NUM_ROWS + 9, NUM_ROWS + 10)
    checks.check()
    bring_duplicates(checks)
    for _ in range(2):  # what was found to be wrong is not noted
        with pytest.raises(JobError, match="ids are not unique"):
            checks.check()


@pytest.mark.long  # a variant of the duplicates above
def test_a_note_is_about_its_ids_and_its_condition_only(checks: Checks) -> None:
    checks.append(5, 6, other=1)
    assert checks.check(where="id > 10").rows_shuffled >= NUM_ROWS - 20
    assert checks.check(where="id > 10").rows_shuffled < FEW
    with pytest.raises(JobError, match="ids are not unique: id=5"):
        checks.check()
    with pytest.raises(JobError, match="ids are not unique: seventh=0"):
        checks.check("seventh", where="id > 10")
    assert checks.check("id", "other").rows_shuffled >= NUM_ROWS
    checks.append(6, 7, other=1)
    assert checks.check(where="id > 10").rows_shuffled < FEW, "beyond the condition, ids may be there twice"
    checks.append(11, 12)
    with pytest.raises(JobError, match="ids are not unique: id=11"):
        checks.check(where="id > 10")
    checks.sql("INSERT INTO {} VALUES (NULL, 0, 0)")
    with pytest.raises(JobError, match="hold nulls: id=None, other=0"):
        checks.check("id", "other")


@pytest.mark.long  # a variant of the duplicates above
def test_a_column_that_was_renamed_is_another_id(checks: Checks) -> None:
    checks.sql("ALTER TABLE {} SET TBLPROPERTIES ('delta.columnMapping.mode' = 'name')")
    checks.check()
    checks.sql("ALTER TABLE {} RENAME COLUMN id TO before")
    checks.sql("ALTER TABLE {} RENAME COLUMN other TO id")
    with pytest.raises(JobError, match="ids are not unique: id=0"):
        checks.check()


@pytest.mark.long  # what storage may lose
def test_all_ids_are_compared_where_the_appended_rows_cannot_be_told(
    checks: Checks, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> bytes:
        raise Py4JError("the table is reached by its name only")

    checks.check()
    with monkeypatch.context() as patch:
        patch.setattr(HadoopFiles, "read_beginning", refuse)
        assert checks.check().rows_shuffled >= NUM_ROWS, "the log cannot be read"
    checks.append(NUM_ROWS, NUM_ROWS + 1)
    checks.append(NUM_ROWS + 1, NUM_ROWS + 2, mergeSchema="true")
    checks.sql("OPTIMIZE {}")
    with set_to(checks.run.spark, {"spark.databricks.delta.retentionDurationCheck.enabled": "false"}):
        checks.sql("VACUUM {} RETAIN 0 HOURS")
    assert checks.check().rows_shuffled >= NUM_ROWS, "the appended files are gone"

    noted = DeltaTable(checks.run.spark, checks.input).version()
    for number in range(NUM_ROWS + 10, NUM_ROWS + 20):  # beyond the log's next checkpoint
        checks.append(number, number + 1)
    Path(checks.input, "_delta_log", f"{noted + 1:020}.json").unlink()
    assert checks.check().rows_shuffled >= NUM_ROWS, "the log is gone"
