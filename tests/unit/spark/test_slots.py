"""How many tasks annotate at once, and how many of other stages run at once."""

from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
from py4j.protocol import Py4JJavaError

from pipemax.wire import GenerationSpec
from pipemax_spark.engines.config import engine_options
from pipemax_spark.spark.slots import (
    Slots,
    annotating_profile,
    annotating_slots,
    cores_per_annotating_task,
    other_slots,
    slots_of,
)

_applications = count()


class _RefusalError(Py4JJavaError):
    """As Spark raises it in Java."""

    def __init__(self) -> None:
        pass


class _Context:
    def __init__(self, executor_cores: list[int], *, refuses: bool) -> None:
        self.applicationId = f"application-{next(_applications)}"
        self.defaultParallelism = sum(executor_cores)
        self._refuses = refuses
        driver = SimpleNamespace(id=lambda: "driver", totalCores=lambda: 0)
        self._executors = [
            SimpleNamespace(id=lambda number=number: str(number), totalCores=lambda cores=cores: cores)
            for number, cores in enumerate(executor_cores)
        ]
        listed = [driver, *self._executors]
        executor_list = SimpleNamespace(apply=listed.__getitem__, size=lambda: len(listed))
        java = SimpleNamespace(
            statusStore=lambda: SimpleNamespace(executorList=lambda active_only: executor_list),
            getExecutorMemoryStatus=lambda: SimpleNamespace(size=lambda: len(listed)),
            resourceProfileManager=lambda: SimpleNamespace(isSupported=self._is_supported),
        )
        self._jsc = SimpleNamespace(sc=lambda: java)

    def _is_supported(self, profile: object) -> bool:
        if self._refuses:
            raise _RefusalError
        return True


def session(executor_cores: list[int], conf: dict[str, str] | None = None, *, refuses: bool = False) -> Any:
    """A session of a standalone cluster on executors with so many cores each."""
    return SimpleNamespace(
        _jvm=object(),
        conf={"spark.master": "spark://head:7077", **(conf or {})},
        sparkContext=_Context(executor_cores, refuses=refuses),
    )


@pytest.mark.parametrize("are_cores_set", [True, False])
@pytest.mark.parametrize(("cores", "asked", "slots"), [(8, 1, 8), (9, 2, 4), (16, 2, 8), (192, 24, 8)])
def test_at_most_eight_tasks_annotate_on_an_executor_and_other_stages_use_all_cores(
    cores: int, asked: int, slots: int, are_cores_set: bool
) -> None:
    spark = session([cores, cores], {"spark.executor.cores": str(cores)} if are_cores_set else {})
    assert cores_per_annotating_task(spark) == asked
    assert (annotating_profile(spark) is None) == (cores <= 8), "a small executor needs no profile"
    assert slots_of(spark).per_executor == slots
    assert other_slots(spark) == 2 * cores


def test_executors_that_are_announced_count() -> None:
    spark = session([], {"spark.executor.instances": "4", "spark.executor.cores": "16"})
    assert slots_of(spark) == Slots(total=32, per_executor=8)
    assert (annotating_slots(spark), other_slots(spark)) == (32, 64)


def test_a_task_has_room_on_the_smallest_executor() -> None:
    assert cores_per_annotating_task(session([64, 16])) == 2


@pytest.mark.parametrize(
    ("refuses", "conf", "slots"),
    [
        (False, {"spark.task.cpus": "24"}, 8),
        (False, {"spark.dynamicAllocation.enabled": "true"}, 192),
        (True, {}, 192),
    ],
    ids=["spark.task.cpus is set", "dynamic allocation", "Spark refuses the profile"],
)
def test_the_session_s_settings_hold_where_the_user_or_spark_wants_it(
    refuses: bool, conf: dict[str, str], slots: int
) -> None:
    spark = session([192], {"spark.executor.cores": "192", **conf}, refuses=refuses)
    assert annotating_profile(spark) is None
    assert slots_of(spark) == Slots(total=slots, per_executor=slots)
    assert other_slots(spark) == slots


def test_gpu_amounts_of_the_session_s_tasks_do_not_limit_the_tasks_that_annotate() -> None:
    profile = annotating_profile(session([4], {"spark.task.resource.gpu.amount": "1"}))
    assert profile is not None
    assert {name: request.amount for name, request in profile.taskResources.items()} == {"cpus": 1}


def test_all_calls_of_a_session_share_one_profile() -> None:
    spark = session([192])
    assert annotating_profile(spark) is annotating_profile(spark)
    assert annotating_profile(spark) is not annotating_profile(session([192]))


def test_a_session_over_spark_connect_has_no_profile() -> None:
    connect: Any = SimpleNamespace(conf={"spark.master": "spark://head:7077", "spark.executor.cores": "192"})
    assert annotating_profile(connect) is None


@pytest.mark.parametrize(
    ("executor_cores", "told", "executors"), [([4, 4, 4], {}, 3), ([8], {}, 1), ([4, 4], {"executors": 5}, 5)]
)
def test_the_limits_of_an_endpoint_are_divided_over_the_executors(
    executor_cores: list[int], told: dict[str, int], executors: int
) -> None:
    engine = {"endpoint": "https://host/v1", "model": "m", **told}
    options = engine_options(
        session(executor_cores), engine, GenerationSpec(), engine_python=None, log_dir=None
    )
    assert options.engine["executors"] == executors
    assert options.gpu_discovery_script is None


def test_an_engine_of_the_executors_own_gets_no_number_of_executors() -> None:
    options = engine_options(
        session([4, 4]), {"model": "m"}, GenerationSpec(), engine_python=None, log_dir=None
    )
    assert options.engine == {"model": "m"}
