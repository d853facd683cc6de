"""How many tasks the application can run at once, and how many pieces a chunk is cut into."""

import math
from typing import Any

_PARTITIONS_PER_SLOT = 2
"""So that an executor that is done early takes more."""
_ROWS_PER_PARTITION = 64
"""Fewer are not worth a task of their own, unless a slot would have none."""


def task_slots(spark: Any) -> int:
    """Over all executors that there are or, where the settings say so, will be."""
    context = spark.sparkContext
    conf = context.getConf()
    cores_per_task = int(conf.get("spark.task.cpus", "1"))
    cores_per_executor = int(conf.get("spark.executor.cores", "1"))
    executors = [int(conf.get("spark.executor.instances", "0"))]
    if conf.get("spark.dynamicAllocation.enabled", "false") == "true":
        executors.append(int(conf.get("spark.dynamicAllocation.maxExecutors", "0")))
    announced = max(executors) * (cores_per_executor // cores_per_task)
    present: int = context.defaultParallelism // cores_per_task
    return max(1, present, announced)


def partitions_for(rows: int, slots: int) -> int:
    """Every slot has work while there are as many rows as slots."""
    wanted = min(_PARTITIONS_PER_SLOT * slots, math.ceil(rows / _ROWS_PER_PARTITION))
    return max(1, min(rows, slots), wanted)
