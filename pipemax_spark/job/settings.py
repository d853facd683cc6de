"""Set better values for some session settings, as far as Spark lets a running session change them.

They hold while a job runs, for the whole session. Settings that must be set before Spark starts are in ``conf/spark/``.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from pipemax_spark.spark_session import (
    ARROW_BATCH,
    ARROW_BATCH_ROWS,
    LOCAL_SNAPSHOT_PARTITIONS,
    SNAPSHOT_PARTITIONS,
    is_local,
)

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@contextmanager
def job_settings(spark: "SparkSession") -> Iterator[None]:
    """Set the values that the job needs, and restore the session's values at exit.

    Rows of an Arrow batch: at most ``ARROW_BATCH_ROWS``, fewer if the user has set fewer. Tasks that read a Delta
    table's log: on one machine ``LOCAL_SNAPSHOT_PARTITIONS``, unless the user has set a number.
    """
    before = {name: spark.conf.get(name, None) for name in (ARROW_BATCH, SNAPSHOT_PARTITIONS)}
    batch_rows = int(before[ARROW_BATCH] or 0)
    wanted = {}
    if not 0 < batch_rows <= ARROW_BATCH_ROWS:  # 0 and less mean no limit to Spark
        wanted[ARROW_BATCH] = ARROW_BATCH_ROWS
    if before[SNAPSHOT_PARTITIONS] is None and is_local(spark):
        wanted[SNAPSHOT_PARTITIONS] = LOCAL_SNAPSHOT_PARTITIONS
    try:
        for name, number in wanted.items():
            spark.conf.set(name, str(number))
        yield
    finally:
        for name in wanted:
            if (value := before[name]) is None:
                spark.conf.unset(name)
            else:
                spark.conf.set(name, value)
