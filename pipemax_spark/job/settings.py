"""Set better values for some session settings, as far as Spark lets a running session change them.

They hold while a job runs, for the whole session. Settings that must be set before Spark starts are in ``conf/spark/``.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from pipemax_spark.spark.session import (
    ARROW_BATCH,
    ARROW_BATCH_ROWS,
    LOCAL_SNAPSHOT_PARTITIONS,
    SNAPSHOT_PARTITIONS,
    is_local,
)

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


_EXACT = {
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
    "spark.sql.parquet.datetimeRebaseModeInWrite": "CORRECTED",
    "spark.sql.parquet.int96RebaseModeInWrite": "CORRECTED",
    "spark.sql.parquet.int96AsTimestamp": "true",
    "spark.databricks.delta.write.utcTimestampPartitionValues": "true",
}
"""Settings under which a table and the job's own files keep every value: without them, rows with a time of less than a
millisecond or a date of before 1582 come back as others or not at all, and a partition's time depends on the reader's
time zone."""
_INEXACT = frozenset({"TIMESTAMP_MILLIS", "LEGACY", "EXCEPTION", "FALSE"})
"""Their other values, which lose something or end the job; Spark's own default for times, INT96, keeps everything."""


_LOSSY = ("spark.sql.files.ignoreMissingFiles", "spark.sql.files.ignoreCorruptFiles")
"""Settings under which rows of a file that is gone or torn are left out without a word. Who wants that for an input
gives it as an option of that input."""


@contextmanager
def job_settings(spark: "SparkSession") -> Iterator[None]:
    """Set the values that the job needs, and restore the session's values at exit.

    Rows of an Arrow batch: at most ``ARROW_BATCH_ROWS``, fewer if the user has set fewer. Tasks that read a Delta
    table's log: on one machine ``LOCAL_SNAPSHOT_PARTITIONS``, unless the user has set a number. What is written: every
    value as it is. What is read: every file.
    """
    names = (ARROW_BATCH, SNAPSHOT_PARTITIONS, *_EXACT, *_LOSSY)
    before = {name: spark.conf.get(name, None) for name in names}
    batch_rows = int(before[ARROW_BATCH] or 0)
    wanted = {name: value for name, value in _EXACT.items() if (before[name] or "").upper() in _INEXACT}
    wanted |= {name: "false" for name in _LOSSY if (before[name] or "").lower() == "true"}
    if not 0 < batch_rows <= ARROW_BATCH_ROWS:  # 0 and less mean no limit to Spark
        wanted[ARROW_BATCH] = str(ARROW_BATCH_ROWS)
    if before[SNAPSHOT_PARTITIONS] is None and is_local(spark):
        wanted[SNAPSHOT_PARTITIONS] = str(LOCAL_SNAPSHOT_PARTITIONS)
    try:
        for name, value in wanted.items():
            spark.conf.set(name, value)
        yield
    finally:
        for name in wanted:
            if (value_before := before[name]) is None:
                spark.conf.unset(name)
            else:
                spark.conf.set(name, value_before)
