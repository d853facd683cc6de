"""The ids of an Iceberg table are compared once for each snapshot."""

import pytest

from pipemax_spark.errors import JobError
from pipemax_spark.rows.unique_ids import check_input_ids
from pipemax_spark.storage.fence import Claim
from pipemax_spark.storage.iceberg import IcebergTable
from pipemax_spark.storage.sources import read_source
from tests.spark.iceberg.conftest import IcebergJobs
from tests.spark.spark_work import Work, counted

pytestmark = pytest.mark.iceberg

NUM_ROWS = 500


def check(run: IcebergJobs, source: str) -> Work:
    """Check the ids as a run does, and claim the output."""
    output = IcebergTable(run.spark, run.output)
    with counted(run.spark) as work:
        note = check_input_ids(output, read_source(run.spark, source), run.defaults, ("id",))
    Claim.take(output, "run", remark=note)
    return work


def test_ids_of_a_snapshot_are_compared_once(run: IcebergJobs, table: IcebergTable) -> None:
    source = run.output.replace("answers", "questions")
    run.spark.sql(f"DROP TABLE IF EXISTS {source}")
    run.spark.range(NUM_ROWS).writeTo(source).using("iceberg").create()
    assert table.exists()
    assert check(run, source).rows_shuffled >= NUM_ROWS
    assert check(run, source).rows_shuffled == 0
    run.spark.sql(f"INSERT INTO {source} VALUES (7)")
    with pytest.raises(JobError, match=r"ids are not unique: id=7 \(2 rows\)"):
        check(run, source)
