"""What a table's spec covers, by jobs on one table."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from pipemax_spark import annotate
from pipemax_spark.errors import JobError
from pipemax_spark.request.prompts import PromptSource
from tests.fakes.settings import fake_config
from tests.spark.conftest import Jobs

MakeJobs = Callable[[], Jobs]
ZONE = "spark.sql.session.timeZone"


@pytest.fixture
def set_zone(spark: Any) -> Iterator[Callable[[str], None]]:
    before = spark.conf.get(ZONE)
    yield lambda zone: spark.conf.set(ZONE, zone)
    spark.conf.set(ZONE, before)


def write_times(run: Jobs) -> None:
    rows = run.spark.sql(
        "SELECT 1L AS id, 'a' AS text, timestamp_seconds(0) AS at, named_struct('at', timestamp_seconds(0)) AS visit"
    )
    rows.write.mode("overwrite").parquet(str(run.directory / "in.parquet"))


@pytest.mark.long  # annotate() distinguishes them, below
def test_prompts_with_timestamps_are_not_mixed_over_time_zones(
    jobs: MakeJobs, set_zone: Callable[[str], None]
) -> None:
    run = jobs()
    source = PromptSource(template="Visit {visit}")
    set_zone("UTC")
    write_times(run)
    run.run(id_columns=("id",), source=source)
    set_zone("Asia/Tokyo")
    with pytest.raises(JobError, match=r'time_zone was "UTC", is "Asia/Tokyo".*--new-spec'):
        run.run(id_columns=("id",), source=source)
    set_zone("UTC")
    run.run(id_columns=("id",), source=source)
    assert len(run.rows()) == 1


@pytest.mark.parametrize(
    "asked", [{"template": "At {at}"}, {"prompt_column": "text", "ask": {"when": "Before {at}?"}}]
)
def test_annotate_distinguishes_time_zones(
    spark: Any, engine_python: str, set_zone: Callable[[str], None], asked: dict[str, Any]
) -> None:
    hashes = set()
    for zone in ("UTC", "Asia/Tokyo"):
        set_zone(zone)
        frame = spark.sql("SELECT timestamp_seconds(0) AS at, 'a' AS text")
        result = annotate(frame, engine=fake_config(), engine_python=engine_python, **asked)
        hashes.add(result.select("annotation.spec_hash").head()[0])
    assert len(hashes) == 2


@pytest.mark.long  # tests/unit/spark compares specs
def test_an_argument_of_vllm_is_refused_if_it_changes_answers_and_a_time_zone_if_it_changes_the_prompt(
    jobs: MakeJobs, set_zone: Callable[[str], None]
) -> None:
    run = jobs()
    set_zone("UTC")
    write_times(run)  # the prompt has none of them
    run.run(id_columns=("id",), engine=fake_config())
    set_zone("Asia/Tokyo")
    for fp8 in ({"kv_cache_dtype": "fp8"}, {"vllm": {"kv_cache_dtype": "fp8"}}):
        with pytest.raises(JobError, match=r'vllm\.kv_cache_dtype was not given, is "fp8".*--new-spec'):
            run.run(id_columns=("id",), engine={"model": "fake", **fp8})
    summary = run.run(id_columns=("id",), engine={"model": "fake", "vllm": {"gpu_memory_utilization": 0.5}})
    assert summary is not None
    assert summary.rows_skipped == 1
    assert len(run.rows()) == 1
