"""``pipemax forget`` on Iceberg: the row leaves in one snapshot, and its files with the older ones."""

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from pipemax_spark.job.forget import ForgetOptions, forget
from pipemax_spark.storage.iceberg import IcebergTable
from tests.spark.iceberg.conftest import IcebergJobs

pytestmark = pytest.mark.iceberg

MARK = "kumquat-4711"


def files_with_mark(table: IcebergTable) -> list[str]:
    files = Path(table.location()).rglob("*.parquet")
    return [str(file) for file in files if MARK in str(pq.ParquetFile(file).read().to_pylist())]


def test_a_forgotten_row_is_in_no_file_once_older_snapshots_have_expired(
    run: IcebergJobs, catalog: str
) -> None:
    run.write_input([(1, MARK), (2, "word"), (3, "another")])
    run.run(id_columns=("id",))
    table = IcebergTable(run.spark, run.output)
    options: dict[str, Any] = {"output": run.output, "id_columns": ("id",), "where": f"text = '{MARK}'"}
    with run.terminal() as terminal:
        assert forget(run.spark, ForgetOptions(**options), terminal) == 1
        assert len(run.rows()) == 3
        assert forget(run.spark, ForgetOptions(**options, is_confirmed=True), terminal) == 1
    assert sorted(row["id"] for row in run.rows()) == [2, 3]
    assert files_with_mark(table), "in the older snapshot"
    run.spark.sql(
        f"CALL {catalog}.system.expire_snapshots(table => 'db.answers', older_than => TIMESTAMP '2100-01-01 00:00:00', "
        "retain_last => 1)"
    )
    assert not files_with_mark(table)
    run.write_input([(2, "word"), (3, "another")])
    assert run.run(id_columns=("id",)).rows_out == 0
