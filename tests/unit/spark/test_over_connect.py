"""Which options a job has over Spark Connect; ``tests/spark/test_connect_job.py`` runs it there."""

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from pipemax.wire import GenerationSpec
from pipemax_spark.errors import JobError, NewSpec
from pipemax_spark.job.over_connect import connect_options
from pipemax_spark.options import JobOptions
from pipemax_spark.request.prompts import PromptSource


def options(**given: Any) -> JobOptions:
    known: dict[str, Any] = {
        "input": "in",
        "output": "/data/out",
        "source": PromptSource(template="Say {text}"),
        "engine": {"model": "fake"},
        "generation": GenerationSpec(),
        "log_dir": Path("logs"),
    }
    return JobOptions(**{**known, **given})


@pytest.mark.parametrize(
    "given",
    [
        {"incremental": True},
        {"cascade": {"model": "small"}},
        {"order_by": "id"},
        {"retry_errors": True},
        {"new_spec": NewSpec.REPLACE},
        {"max_tokens_total": 1_000},
        {"canary": 50},
        {"dry_run": True},
        {"reuse": "earlier"},
        {"input_format": "csv"},
    ],
    ids=lambda given: next(iter(given)),
)
def test_what_a_client_cannot_do_is_refused_by_its_name(given: dict[str, Any]) -> None:
    with pytest.raises(JobError, match=rf"over Spark Connect the job has no {next(iter(given))} yet: it "):
        connect_options(options(**given))


def test_what_only_some_jobs_do_is_refused_too() -> None:
    priced = {"model": "m", "endpoint": "https://host/v1", "price_per_million_output_tokens": 1.0}
    for given, name in (
        ({"engine": priced, "max_cost": 5.0}, "max_cost with prices of tokens"),
        ({"summary": "s3a://bucket/summary.json"}, "summary on remote storage"),
    ):
        with pytest.raises(JobError, match=f"has no {name} yet"):
            connect_options(options(**given))


def test_the_other_options_stay_and_the_driver_s_files_are_this_machine_s() -> None:
    given = options(limit=5, where="id > 3", commit_every=timedelta(minutes=1), max_hours=2.0)
    connected = connect_options(given)
    assert (connected.limit, connected.where, connected.max_hours) == (5, "id > 3", 2.0)
    assert given.driver_dir == Path("/data")
    assert connected.driver_dir == Path.cwd() / "pipemax"
