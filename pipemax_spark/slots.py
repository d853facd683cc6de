"""How many tasks run at once, and how many pieces a chunk is cut into: so few that engines never want for rows.

A task holds its slot until its last row is done, and while that row waits and runs, the engine takes in further rows:
a few times what it holds. They must come from the executor's other tasks. As partitions are sent one behind the other
(``pipemax.serve.flow``), ``tail × engine's rows / partition's rows`` slots are waiting thus at any time, and one must
be left that sends. Then no partition's end, and no chunk's, ends a prefill phase. With one slot an executor there is
no such size.
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_TAIL = 4.0
"""Rows that the engine takes in from a stream's last row to its slot's next one, as a multiple of those that it has
room for. On a virtual engine with 2, 4 and 8 slots, 2 times the mean room was enough and 1.6 was not; the room of a
moment can be a third below the mean, and outputs of more varied lengths keep a slot longer."""
_PARTITIONS_PER_SLOT = 2
"""At most, so that an executor that is done early takes more."""
_ROWS_PER_PARTITION = 64
"""Fewer are not worth a task of their own, unless a slot would have none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slots:
    """Tasks that can run at once."""

    total: int
    per_executor: int

    def fed_partition_rows(self, engine_rows: int | None) -> int | None:
        """Rows of a partition with which an engine that holds ``engine_rows`` always finds one to read from."""
        if engine_rows is None:
            return None
        return math.ceil(_TAIL * engine_rows / max(1, self.per_executor - 1))

    def partitions_for(self, rows: int, *, engine_rows: int | None = None, is_last: bool = False) -> int:
        """Every slot has work while there are as many rows as slots. The last chunk's partitions are small where
        there are several executors: nothing else evens out when they end."""
        fed_rows = self.fed_partition_rows(engine_rows)
        most = _PARTITIONS_PER_SLOT * self.total
        if is_last and self.total > self.per_executor:
            wanted = most
        else:
            wanted = self.total if fed_rows is None else max(self.total, min(most, rows // fed_rows))
        return max(1, min(rows, self.total), min(wanted, math.ceil(rows / _ROWS_PER_PARTITION)))


def slots_of(spark: "SparkSession") -> Slots:
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
    total = max(1, present, announced)
    master = context.master or ""
    if master.startswith("local") and not master.startswith("local-cluster"):
        return Slots(total=total, per_executor=total)
    if conf.get("spark.executor.cores") is None:  # a standalone worker's executor takes all of its cores
        running = max(1, context._jsc.sc().getExecutorMemoryStatus().size() - 1)
        return Slots(total=total, per_executor=max(1, present // running))
    return Slots(total=total, per_executor=max(1, cores_per_executor // cores_per_task))
