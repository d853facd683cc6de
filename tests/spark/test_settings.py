"""The session's settings while a job runs, and after it."""

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pyarrow as pa
import pytest

from pipemax_spark.job.settings import job_settings
from tests.spark.spark_work import set_to

BATCH_ROWS = "spark.sql.execution.arrow.maxRecordsPerBatch"


def largest_batch(spark: Any) -> int:
    def sizes(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            yield pa.RecordBatch.from_pydict({"rows": [batch.num_rows]})

    return max(
        row["rows"] for row in spark.range(5_000, numPartitions=1).mapInArrow(sizes, "rows long").collect()
    )


@pytest.mark.parametrize(
    ("given", "in_the_job"), [("5000", 1_024), ("0", 1_024), (None, 1_024), ("100", 100)]
)
def test_tasks_of_a_job_get_small_batches_and_the_user_s_setting_comes_back_after_a_failure_too(
    spark: Any, given: str | None, in_the_job: int
) -> None:
    with set_to(spark, {BATCH_ROWS: given}):
        before = spark.conf.get(BATCH_ROWS, None)
        with suppress(ZeroDivisionError), job_settings(spark):
            assert largest_batch(spark) == in_the_job
            raise ZeroDivisionError
        assert spark.conf.get(BATCH_ROWS, None) == before
