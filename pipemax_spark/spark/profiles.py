"""Build the resource profile of executors that have GPUs, and find the script that discovers GPUs.

A task's own GPU addresses play no part: an executor's tasks feed one engine that owns all GPUs of the executor
(``pipemax_spark.executor.resources``). So a profile requests whole executors, and enough task slots to keep the engine
busy.
"""

import math
from typing import TYPE_CHECKING

from pipemax_spark.errors import JobError

if TYPE_CHECKING:
    from pyspark.resource import ResourceProfile
    from pyspark.sql import SparkSession

_GPU = "gpu"
_SCRIPT_CONF = "spark.executor.resource.gpu.discoveryScript"


def gpu_profile(
    spark: "SparkSession",
    *,
    gpus_per_executor: int,
    task_slots: int = 4,
    memory: str | None = None,
    memory_overhead: str | None = None,
    discovery_script: str | None = None,
) -> "ResourceProfile":
    """Build a ``ResourceProfile`` for ``annotate(..., profile=)``: executors with ``gpus_per_executor`` GPUs.

    The executors serve only these stages, with ``task_slots`` tasks at once on each. ``memory`` and ``memory_overhead``
    are written as in Spark (``"8g"``); host KV counts as overhead. The default discovery script is the session's. Raise
    ``JobError`` if the cluster cannot start such executors.
    """
    from pyspark.resource import ExecutorResourceRequests, ResourceProfileBuilder, TaskResourceRequests

    if gpus_per_executor < 1 or task_slots < 1:
        raise JobError(
            f"gpus_per_executor is {gpus_per_executor} and task_slots is {task_slots}; both must be 1 or more"
        )
    _check_cluster(spark)
    script = discovery_script or discovery_script_of(spark) or ""
    executor = ExecutorResourceRequests().cores(task_slots).resource(_GPU, gpus_per_executor, script)
    if memory is not None:
        executor.memory(memory)
    if memory_overhead is not None:
        executor.memoryOverhead(memory_overhead)
    # The cores limit the number of tasks. Each task asks for a GPU share that lets that many run. Spark accepts a whole
    # GPU or 1/n of one, n being a whole number.
    share = 1.0 / math.ceil(task_slots / gpus_per_executor)
    task = TaskResourceRequests().cpus(1).resource(_GPU, share)
    return ResourceProfileBuilder().require(executor).require(task).build


def discovery_script_of(spark: "SparkSession", profile: "ResourceProfile | None" = None) -> str | None:
    """Return the script that finds an executor's GPUs: the profile's, or else the session's."""
    if profile is not None and (request := profile.executorResources.get(_GPU)) and request.discoveryScript:
        return str(request.discoveryScript)
    return spark.conf.get(_SCRIPT_CONF, None)


def _check_cluster(spark: "SparkSession") -> None:
    master = spark.conf.get("spark.master") or ""
    if master.startswith("local["):
        raise JobError(
            f"master {master!r} has no executors to give GPUs to: its engine takes every GPU it sees, leave profile out"
        )
    if spark.conf.get("spark.dynamicAllocation.enabled", "false") != "true":
        raise JobError(
            "executors of another shape for some stages need spark.dynamicAllocation.enabled=true; else leave profile "
            "out and give all executors their GPUs (spark.executor.resource.gpu.amount)"
        )
