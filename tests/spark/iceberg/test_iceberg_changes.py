"""Nights over an Iceberg table: what was appended, changed and deleted there, with a Delta or an Iceberg output."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from pipemax_spark.errors import JobError, OnDelete
from pipemax_spark.job.deleted import DELETED_AT
from pipemax_spark.rows.position import Positions
from pipemax_spark.storage.iceberg import IcebergTable
from tests.fakes.settings import expected_text
from tests.spark.conftest import Jobs
from tests.spark.iceberg.conftest import IcebergJobs

pytestmark = pytest.mark.iceberg

SCHEMA = "id long, text string"
IDS = {"id_columns": ("id",)}


class DiedError(RuntimeError):
    """The driver dies here."""


class IcebergNights:
    """An Iceberg table, and one job a night over it."""

    def __init__(self, jobs: Jobs, source: str) -> None:
        self.jobs, self.spark, self.source = jobs, jobs.spark, source
        self.jobs.defaults = replace(jobs.defaults, input=source, incremental=True)

    def append(self, *rows: tuple[int, str]) -> None:
        self.spark.createDataFrame(rows, SCHEMA).coalesce(1).writeTo(self.source).append()

    def sql(self, statement: str) -> None:
        self.spark.sql(statement.format(input=self.source))

    def run(self, **changes: Any) -> tuple[int, int, int]:
        """(rows in, skipped, out)."""
        summary = self.jobs.run(**changes)
        return summary.rows_in, summary.rows_skipped, summary.rows_out

    def texts(self) -> dict[int, str]:
        """Each id's text in the output; each id once, with the answer to its text."""
        rows = self.jobs.rows()
        found = {row["id"]: row["text"] for row in rows}
        assert len(found) == len(rows)
        assert all(row["annotation"]["text"] == expected_text(f"Say {row['text']}", 16) for row in rows)
        return found

    def in_input(self) -> dict[int, str]:
        self.spark.catalog.refreshTable(self.source)
        return {row["id"]: row["text"] for row in self.spark.table(self.source).collect()}


@pytest.fixture
def source(catalog: str, spark: Any) -> Iterator[str]:
    name = f"{catalog}.db.tickets"
    spark.sql(
        f"CREATE TABLE {name} (id BIGINT, text STRING) USING iceberg TBLPROPERTIES ('format-version' = '2')"
    )
    yield name
    spark.sql(f"DROP TABLE {name}")


@pytest.fixture
def nights(run: IcebergJobs, source: str) -> IcebergNights:
    return IcebergNights(run, source)


def test_appended_changed_and_deleted_rows_arrive_once(nights: IcebergNights) -> None:
    remove = {"on_delete": OnDelete.REMOVE, **IDS}
    assert nights.run(**remove) == (0, 0, 0), "the table has no snapshot yet"
    nights.append(*((i, f"word {i}") for i in range(5)))
    assert nights.run(**remove) == (5, 0, 5)
    nights.append((5, "word 5"))
    nights.append((6, "word 6"))
    assert nights.run(**remove) == (2, 0, 2)
    nights.sql("UPDATE {input} SET text = 'changed' WHERE id = 1")
    nights.sql("DELETE FROM {input} WHERE id IN (2, 3)")
    nights.append((3, "again"))
    nights.spark.createDataFrame([(0, "merged"), (7, "new")], SCHEMA).createOrReplaceTempView("news")
    nights.sql(
        "MERGE INTO {input} AS t USING news AS s ON t.id = s.id WHEN MATCHED THEN UPDATE SET * "
        "WHEN NOT MATCHED THEN INSERT *"
    )
    assert nights.run(**remove) == (4, 0, 4), "rows that only moved to other files are no changes"
    assert nights.texts() == nights.in_input()
    assert nights.run(**remove) == (0, 0, 0)


def test_a_night_that_dies_before_its_position_is_noted_is_repaired_by_the_same_command(
    nights: IcebergNights, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = {"on_delete": OnDelete.MARK, **IDS}
    nights.append((0, "zero"), (1, "one"), (2, "two"))
    nights.run(**mark)
    nights.sql("UPDATE {input} SET text = 'changed' WHERE id = 1")
    nights.sql("DELETE FROM {input} WHERE id = 2")

    def dying(*_: Any, **__: Any) -> None:
        raise DiedError

    with monkeypatch.context() as patch:
        patch.setattr(Positions, "write", dying)
        with pytest.raises(DiedError):
            nights.run(**mark)
    assert nights.run(**mark) == (1, 1, 0)
    assert nights.texts() == {0: "zero", 1: "changed", 2: "two"}
    assert {row["id"] for row in nights.jobs.rows() if row[DELETED_AT] is not None} == {2}
    nights.append((2, "two"))
    assert nights.run(**mark) == (1, 1, 0)
    assert all(row[DELETED_AT] is None for row in nights.jobs.rows())


def test_where_changes_cannot_be_read_all_rows_are_compared(nights: IcebergNights) -> None:
    remove = {"on_delete": OnDelete.REMOVE, **IDS}
    nights.append((0, "zero"), (1, "one"))
    nights.run(**remove)
    first = IcebergTable(nights.spark, nights.source).pinned({})[1]
    nights.append((2, "two"))
    nights.run(**remove)
    catalog = nights.source.partition(".")[0]
    nights.sql(f"CALL {catalog}.system.rollback_to_snapshot('db.tickets', {first})")
    nights.sql("UPDATE {input} SET text = 'changed' WHERE id = 1")
    nights.run(**remove)
    assert "cannot be read, so all of its rows are compared" in nights.jobs.printed
    assert nights.texts() == nights.in_input() == {0: "zero", 1: "changed"}
    nights.sql("ALTER TABLE {input} SET TBLPROPERTIES ('write.delete.mode' = 'merge-on-read')")
    nights.append((3, "three"), (4, "four"))
    nights.sql("DELETE FROM {input} WHERE id = 3")
    nights.run(**remove)
    assert nights.texts() == nights.in_input() == {0: "zero", 1: "changed", 4: "four"}


def test_without_ids_appends_are_followed_and_changes_are_refused_or_skipped(nights: IcebergNights) -> None:
    nights.append((0, "zero"), (1, "one"))
    assert nights.run() == (2, 0, 2)
    nights.append((0, "zero"), (2, "two"))
    assert nights.run() == (2, 0, 2)
    nights.sql("UPDATE {input} SET text = 'changed' WHERE id = 1")
    with pytest.raises(
        JobError, match=r"follows only appends here.*needs --id-columns.*--skip-changes.*--rescan"
    ):
        nights.run()
    nights.append((3, "three"))
    assert nights.run(skip_changes=True) == (2, 0, 2), (
        "the added row, and the changed one as what the output lacks"
    )
    assert nights.run() == (0, 0, 0)


def test_an_iceberg_input_fills_a_delta_output(
    spark: Any, source: str, tmp_path: Any, engine_python: str
) -> None:
    jobs = Jobs(spark, tmp_path, engine_python)
    jobs.defaults = replace(jobs.defaults, mlflow_experiment="")
    nights = IcebergNights(jobs, source)
    nights.append((0, "zero"), (1, "one"))
    assert nights.run(**IDS) == (2, 0, 2)
    nights.sql("UPDATE {input} SET text = 'changed' WHERE id = 1")
    nights.append((2, "two"))
    assert nights.run(**IDS) == (2, 0, 2)
    assert nights.texts() == nights.in_input()
