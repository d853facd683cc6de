"""Count task slots, limit those of tasks that annotate, and size a chunk's partitions so that engines never run dry.

An executor's tasks mostly wait for its engine, and each is a Python process that holds rows: a few keep the engine
busy, so a resource profile limits how many annotate at once on a large executor. Spark accepts a profile for tasks only
without dynamic allocation, on standalone clusters, YARN and Kubernetes. Elsewhere, and if the user has set
``spark.task.cpus``, the session's settings apply to the stage that annotates too.

A task holds its slot until its last row is done. While that row waits and runs, the engine takes in further rows, a few
times as many as it holds, and they must come from the executor's other tasks. Partitions are sent one after the other
(``pipemax.serve.flow``), so at any time ``tail × engine's rows / partition's rows`` slots only wait for their last
rows, and one more slot is needed to send. Then neither the end of a partition nor the end of a chunk ends a prefill
phase. With one slot per executor there is no such size.
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipemax_spark.spark.session import is_connect, is_local

if TYPE_CHECKING:
    from pyspark.resource import ResourceProfile
    from pyspark.sql import SparkSession

_TAIL = 4.0
"""Rows that the engine takes in between a stream's last row and the slot's next row, as a multiple of the rows that it
has room for. On a virtual engine with 2, 4 and 8 slots, 2 times the mean room was enough and 1.6 was not; at a given
moment the room can be a third below the mean, and outputs of more varied lengths keep a slot longer."""
_PARTITIONS_PER_SLOT = 2
"""Maximum, so that an executor that finishes early takes more."""
_ROWS_PER_PARTITION = 64
"""Fewer rows do not justify a separate task, unless a slot would have none."""
_COUNTED_ROWS = 1_000_000
"""More than a cluster has cores."""
_MAX_TASKS = 8
"""Maximum of annotating tasks on an executor at once."""
_profiles: "dict[tuple[str, int], ResourceProfile | None]" = {}
"""(application, cores per task) → profile; None if Spark refuses it. All stages share one profile, because Spark
refuses a stage with two profiles, which two chained calls would create."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slots:
    """Tasks that can run at once."""

    total: int
    per_executor: int

    @property
    def executors(self) -> int:
        """The number of executors."""
        return max(1, self.total // self.per_executor)

    def fed_partition_rows(self, engine_rows: int | None) -> int | None:
        """Return the rows per partition at which an engine that holds ``engine_rows`` always has a partition to read.

        Return None if ``engine_rows`` is None.
        """
        if engine_rows is None:
            return None
        return math.ceil(_TAIL * engine_rows / max(1, self.per_executor - 1))

    def partitions_for(self, rows: int, *, engine_rows: int | None = None, is_last: bool = False) -> int:
        """Return how many partitions a chunk of ``rows`` rows has.

        Every slot has work as long as there are at least as many rows as slots. With several executors, the last
        chunk's partitions are small: nothing else evens out when the executors finish.
        """
        fed_rows = self.fed_partition_rows(engine_rows)
        maximum = _PARTITIONS_PER_SLOT * self.total
        if is_last and self.total > self.per_executor:
            wanted = maximum
        else:
            wanted = self.total if fed_rows is None else max(self.total, min(maximum, rows // fed_rows))
        return max(1, min(rows, self.total), min(wanted, math.ceil(rows / _ROWS_PER_PARTITION)))


def slots_of(spark: "SparkSession") -> Slots:
    """Count the slots for tasks that annotate, on all executors that exist or, if the settings say so, will exist.

    Over Spark Connect this runs a small Spark job, and takes all slots for one executor's if the settings do not say.
    """
    cores_per_task = cores_per_annotating_task(spark)
    total = _total_slots(spark, cores_per_task)
    if is_local(spark):
        return Slots(total=total, per_executor=total)
    if spark.conf.get("spark.executor.cores", None) is None:
        if is_connect(spark):
            return Slots(total=total, per_executor=total)
        # An executor of a standalone cluster takes all of its worker's cores.
        running = max(1, spark.sparkContext._jsc.sc().getExecutorMemoryStatus().size() - 1)
        return Slots(total=total, per_executor=max(1, _present_cores(spark) // cores_per_task // running))
    return Slots(total=total, per_executor=_announced_slots_per_executor(spark, cores_per_task))


def annotating_slots(spark: "SparkSession") -> int:
    """Count the slots for tasks that annotate, as ``slots_of``. Over Spark Connect this runs a small Spark job."""
    return _total_slots(spark, cores_per_annotating_task(spark))


def other_slots(spark: "SparkSession") -> int:
    """Count the slots for tasks of other stages, as ``slots_of``. Over Spark Connect this runs a small Spark job."""
    return _total_slots(spark, cores_per_other_task(spark))


def _total_slots(spark: "SparkSession", cores_per_task: int) -> int:
    executors = [_setting(spark, "spark.executor.instances", 0)]
    if spark.conf.get("spark.dynamicAllocation.enabled", "false") == "true":
        executors.append(_setting(spark, "spark.dynamicAllocation.maxExecutors", 0))
    announced = max(executors) * _announced_slots_per_executor(spark, cores_per_task)
    return max(1, _present_cores(spark) // cores_per_task, announced)


def _announced_slots_per_executor(spark: "SparkSession", cores_per_task: int) -> int:
    return max(1, _setting(spark, "spark.executor.cores", 1) // cores_per_task)


def _present_cores(spark: "SparkSession") -> int:
    if not is_connect(spark):
        cores: int = spark.sparkContext.defaultParallelism
        return cores
    from pyspark.sql import functions as F  # noqa: N812

    # Spark Connect has no context, but a range has as many partitions as there are cores.
    partitions = spark.range(_COUNTED_ROWS).select(F.spark_partition_id().alias("partition"))
    return int(partitions.agg(F.max("partition")).collect()[0][0]) + 1


def _setting(spark: "SparkSession", name: str, default: int) -> int:
    return int(spark.conf.get(name, None) or default)


def annotating_profile(spark: "SparkSession") -> "ResourceProfile | None":
    """Return the profile of the stage that annotates, or None if the session's settings apply.

    It asks for cores only, so ``spark.task.resource.gpu.amount`` does not limit how many tasks annotate at once.
    """
    if (
        is_connect(spark)
        or spark.conf.get("spark.task.cpus", None) is not None
        or spark.conf.get("spark.dynamicAllocation.enabled", "false") == "true"
    ):
        return None
    executor_cores = _cores_per_executor(spark)
    is_limited_by_gpus = spark.conf.get("spark.task.resource.gpu.amount", None) is not None
    if executor_cores is None or (executor_cores <= _MAX_TASKS and not is_limited_by_gpus):
        return None
    cores = math.ceil(executor_cores / _MAX_TASKS)
    key = (spark.sparkContext.applicationId, cores)
    if key not in _profiles:
        _profiles[key] = _profile_of_tasks(spark, cores)
    return _profiles[key]


def cores_per_annotating_task(spark: "SparkSession") -> int:
    """Return the cores that a task of the stage that annotates takes."""
    if (profile := annotating_profile(spark)) is not None:
        return int(profile.taskResources["cpus"].amount)
    return cores_per_other_task(spark)


def cores_per_other_task(spark: "SparkSession") -> int:
    """Return the cores that a task of any other stage takes."""
    return int(spark.conf.get("spark.task.cpus", None) or 1)


def _profile_of_tasks(spark: "SparkSession", cores: int) -> "ResourceProfile | None":
    from py4j.protocol import Py4JJavaError
    from pyspark.resource import ResourceProfileBuilder, TaskResourceRequests

    profile = ResourceProfileBuilder().require(TaskResourceRequests().cpus(cores)).build
    try:
        spark.sparkContext._jsc.sc().resourceProfileManager().isSupported(profile._java_resource_profile)
    except Py4JJavaError:  # such as in local mode
        return None
    return profile


def _cores_per_executor(spark: "SparkSession") -> int | None:
    """Return the cores of the smallest executor, which must have room for a task; None if there is no executor yet."""
    if (cores := spark.conf.get("spark.executor.cores", None)) is not None:
        return int(cores)
    # An executor of a standalone cluster takes all of its worker's cores.
    listed = spark.sparkContext._jsc.sc().statusStore().executorList(True)
    executors = (listed.apply(index) for index in range(listed.size()))
    return min((executor.totalCores() for executor in executors if executor.id() != "driver"), default=None)
