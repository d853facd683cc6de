"""Limit how many annotating tasks run at once on a large executor, by a resource profile for their stage.

An executor's tasks mostly wait for its engine, and each is a Python process that holds rows: a few keep the engine
busy. Spark accepts a profile for tasks only without dynamic allocation, on standalone clusters, YARN and Kubernetes.
Elsewhere, and if the user has set ``spark.task.cpus``, the session's settings apply to this stage too.
"""

import math
from typing import TYPE_CHECKING

from pipemax_spark.spark.session import is_connect

if TYPE_CHECKING:
    from pyspark.resource import ResourceProfile
    from pyspark.sql import SparkSession

_MAX_TASKS = 8
"""Maximum of annotating tasks on an executor at once."""
_profiles: "dict[tuple[str, int], ResourceProfile | None]" = {}
"""(application, cores per task) → profile; None if Spark refuses it. All stages share one profile, because Spark
refuses a stage with two profiles, which two chained calls would create."""


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
