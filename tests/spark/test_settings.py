"""The session's settings while a job runs, and after it."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from io import StringIO
from typing import Any

import pyarrow as pa
import pytest
from rich.console import Console

from pipemax_spark.job.annotation_job import AnnotationJob
from pipemax_spark.job.settings import job_settings
from pipemax_spark.report.terminal import Terminal
from tests.spark.conftest import Jobs

BATCH_ROWS = "spark.sql.execution.arrow.maxRecordsPerBatch"


@pytest.fixture
def user_spark(spark: Any) -> Iterator[Any]:
    """The session, whose setting a test may change."""
    before = spark.conf.get(BATCH_ROWS)
    yield spark
    spark.conf.set(BATCH_ROWS, before)


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
def test_tasks_of_a_job_get_small_batches_and_the_user_s_setting_comes_back(
    user_spark: Any, given: str | None, in_the_job: int
) -> None:
    if given is None:
        user_spark.conf.unset(BATCH_ROWS)
    else:
        user_spark.conf.set(BATCH_ROWS, given)
    before = user_spark.conf.get(BATCH_ROWS, None)
    with job_settings(user_spark):
        assert largest_batch(user_spark) == in_the_job
    assert user_spark.conf.get(BATCH_ROWS, None) == before


@pytest.mark.long  # two jobs
def test_a_job_runs_under_these_settings_also_when_it_fails(
    user_spark: Any, jobs: Callable[[], Jobs]
) -> None:
    run = jobs()
    run.write_input([(0, "one")])
    user_spark.conf.set(BATCH_ROWS, "5000")
    seen = set()

    class Output(StringIO):
        def write(self, text: str) -> int:
            seen.add(user_spark.conf.get(BATCH_ROWS))
            return super().write(text)

    options = replace(run.defaults, engine={"model": "fake", "polcy": 1})
    with pytest.raises(ValueError, match="polcy"):
        AnnotationJob(user_spark, options, Terminal(Console(file=Output()))).run()
    assert seen == {"1024"}
    assert user_spark.conf.get(BATCH_ROWS) == "5000"
