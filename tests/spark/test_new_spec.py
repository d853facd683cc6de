"""What a table's spec covers, by jobs on one table."""

from typing import Any

import pytest

from pipemax_spark import annotate
from pipemax_spark.errors import JobError
from pipemax_spark.request.prompts import PromptSource
from tests.spark.conftest import Jobs
from tests.spark.spark_work import set_to

ZONE = "spark.sql.session.timeZone"


@pytest.mark.long  # annotate() distinguishes them, below
def test_prompts_with_timestamps_are_not_mixed_over_time_zones(run: Jobs) -> None:
    rows = run.spark.sql("SELECT 1L AS id, 'a' AS text, named_struct('at', timestamp_seconds(0)) AS visit")
    rows.write.parquet(run.defaults.input)
    options = {"id_columns": ("id",), "source": PromptSource(template="Visit {visit}")}
    with set_to(run.spark, {ZONE: "UTC"}):
        run.run(**options)
    tokyo = r'time_zone was "UTC", is "Asia/Tokyo".*--new-spec'
    with set_to(run.spark, {ZONE: "Asia/Tokyo"}), pytest.raises(JobError, match=tokyo):
        run.run(**options)
    with set_to(run.spark, {ZONE: "UTC"}):
        run.run(**options)
    assert len(run.rows()) == 1


@pytest.mark.parametrize(
    "asked", [{"template": "At {at}"}, {"prompt_column": "text", "ask": {"when": "Before {at}?"}}]
)
def test_annotate_distinguishes_time_zones(spark: Any, fake: dict[str, Any], asked: dict[str, Any]) -> None:
    hashes = set()
    for zone in ("UTC", "Asia/Tokyo"):
        with set_to(spark, {ZONE: zone}):
            frame = spark.sql("SELECT timestamp_seconds(0) AS at, 'a' AS text")
            result = annotate(frame, **fake, **asked)
            hashes.add(result.select("annotation.spec_hash").head()[0])
    assert len(hashes) == 2
