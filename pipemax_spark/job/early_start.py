"""Start the engines while the job prepares, by a short Spark job with a task in every slot.

The tasks end as soon as the engines have begun to load, so they hold no slot that preparing needs. Executors that join
later start their engine with their first rows, as any executor would without this.
"""

import logging
import threading
from typing import TYPE_CHECKING, Self

from pipemax_spark.executor.client import EngineOptions
from pipemax_spark.executor.early_start import BeginLoading
from pipemax_spark.spark.jobs import jobs_of
from pipemax_spark.spark.slots import slots_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

log = logging.getLogger(__name__)


class EarlyStart:
    """Starts the engines of one run, at most once, in the background. Nothing of it is left after the context."""

    def __init__(self, spark: "SparkSession", options: EngineOptions) -> None:
        self._spark = spark
        self._jobs = jobs_of(spark)
        self._options = options
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._thread is not None:
            self._jobs.cancel(self._tag)
            self._thread.join()

    def begin(self) -> None:
        """Start the engines, if that has not been done, and return at once."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="pipemax-early-start", daemon=True)
            self._thread.start()

    @property
    def _tag(self) -> str:
        return f"{self._options.job_id}-start"

    def _run(self) -> None:
        options = self._options
        self._jobs.tag(self._tag)
        self._jobs.describe(f"pipemax run {options.job_id}: engines begin to load")
        slots = slots_of(self._spark).total
        try:
            tasks = self._spark.range(slots, numPartitions=slots).mapInArrow(BeginLoading(options), "id long")
            tasks.write.format("noop").mode("overwrite").save()
        # Whatever the error is, the first rows will meet it again, unless the run has ended.
        except Exception:
            log.info("the engines were not started early", exc_info=True)
