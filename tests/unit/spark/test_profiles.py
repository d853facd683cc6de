"""The profile of executors with GPUs, as Spark will read it."""

from types import SimpleNamespace
from typing import Any

import pytest

from pipemax_spark.errors import JobError
from pipemax_spark.spark.profiles import discovery_script_of, gpu_profile

CLUSTER = {"spark.master": "yarn", "spark.dynamicAllocation.enabled": "true"}


def session(**conf: str) -> Any:
    return SimpleNamespace(conf=conf)


@pytest.mark.parametrize(
    ("gpus", "slots", "share"), [(8, 4, 1.0), (2, 4, 0.5), (2, 3, 0.5), (1, 1, 1.0), (1, 3, 1 / 3)]
)
def test_as_many_tasks_run_as_there_are_slots(gpus: int, slots: int, share: float) -> None:
    profile = gpu_profile(
        session(**CLUSTER), gpus_per_executor=gpus, task_slots=slots, memory_overhead="200g"
    )
    executor, task = profile.executorResources, profile.taskResources
    assert (executor["gpu"].amount, executor["cores"].amount) == (gpus, slots)
    assert executor["memoryOverhead"].amount == 200 * 1024
    assert task["cpus"].amount == 1
    assert task["gpu"].amount == pytest.approx(share)
    # As Spark counts: a GPU has a whole number of parts, and the cores are what bounds the tasks.
    assert gpus * round(1 / share) >= slots


def test_the_discovery_script_is_the_profile_s_or_the_session_s() -> None:
    spark = session(**CLUSTER, **{"spark.executor.resource.gpu.discoveryScript": "/session"})
    assert discovery_script_of(spark, gpu_profile(spark, gpus_per_executor=2)) == "/session"
    own = gpu_profile(spark, gpus_per_executor=2, discovery_script="/own")
    assert discovery_script_of(spark, own) == "/own"
    assert discovery_script_of(spark) == "/session"
    assert discovery_script_of(session(**CLUSTER)) is None


@pytest.mark.parametrize(
    ("conf", "arguments", "told"),
    [
        ({"spark.master": "local[4]"}, {}, "has no executors to give GPUs to"),
        ({"spark.master": "yarn"}, {}, "spark.dynamicAllocation.enabled=true"),
        (CLUSTER, {"gpus_per_executor": 0}, "gpus_per_executor is 0"),
        (CLUSTER, {"task_slots": 0}, "task_slots is 0"),
    ],
)
def test_impossible_settings_are_refused_with_the_remedy(
    conf: dict[str, str], arguments: dict[str, int], told: str
) -> None:
    with pytest.raises(JobError, match=told):
        gpu_profile(session(**conf), **{"gpus_per_executor": 2, **arguments})
