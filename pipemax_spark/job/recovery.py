"""Recover what a dead run had completed but not committed: its spool, joined with the rows that are left."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import pyarrow as pa

from pipemax.wire import COMPLETION_SCHEMA
from pipemax_spark.dataframe import annotated_schema
from pipemax_spark.executor.spool import KEY, SPOOL_SCHEMA
from pipemax_spark.executor.task import KEY_COLUMN, Annotator, TaskPlan
from pipemax_spark.job.left import occurrence
from pipemax_spark.job.workdir import LeftSpool
from pipemax_spark.sql import quoted

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_COMPLETION, _OCCURRENCE = "__pipemax_completion", "__pipemax_occurrence"


def spooled_rows(spark: "SparkSession", left: "DataFrame", spool: LeftSpool) -> "DataFrame":
    """Return the rows that the spool has completed, each with its completion.

    ``left`` is the input's rows that the table lacks, with their keys. A completion serves one row, and a row takes one
    completion: of equal rows, as many are done as the spool holds.
    """
    from pyspark.sql import functions as F  # noqa: N812

    known = _completions(spark, spool.directory)
    completion = F.struct(*(F.col(quoted(name)) for name in COMPLETION_SCHEMA.names)).alias(_COMPLETION)
    known = known.select(F.col(KEY).alias(KEY_COLUMN), occurrence(KEY).alias(_OCCURRENCE), completion)
    pairs = left.withColumn(_OCCURRENCE, occurrence(KEY_COLUMN)).join(known, [KEY_COLUMN, _OCCURRENCE])
    columns = [pairs[quoted(name)] for name in left.columns if name != KEY_COLUMN]
    return pairs.select(*columns, _COMPLETION)


def without_completions(spooled: "DataFrame") -> "DataFrame":
    """Return the rows of ``spooled_rows`` as they were."""
    return spooled.drop(_COMPLETION)


def annotated_rows(spooled: "DataFrame", spool: LeftSpool, *, plan: TaskPlan) -> "DataFrame":
    """Return the rows of ``spooled_rows`` with their annotations, which name the run that computed them."""
    task = RecallTask(replace(plan, run_id=spool.run_id))
    own = without_completions(spooled).schema
    return spooled.mapInArrow(task, annotated_schema(own, plan.output_column, plan.options.generation))


@dataclass(frozen=True, slots=True)
class RecallTask:
    """The function of ``mapInArrow``: rows with their completions in, annotated rows out."""

    plan: TaskPlan

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        annotator = Annotator(self.plan)
        for batch in batches:
            parts = pa.RecordBatch.from_struct_array(batch.column(_COMPLETION))
            completions = pa.RecordBatch.from_arrays(
                [parts.column(field.name).cast(field.type) for field in COMPLETION_SCHEMA],
                schema=COMPLETION_SCHEMA,
            )
            rows = batch.drop_columns([_COMPLETION])
            yield pa.RecordBatch.from_arrays(
                [*rows.columns, annotator.annotations(completions)],
                names=[*rows.schema.names, self.plan.output_column],
            )


def _completions(spark: "SparkSession", directory: str) -> "DataFrame":
    from pyspark.sql.pandas.types import from_arrow_schema

    # A file that was torn when the run died is skipped, and its rows are done again.
    options = {"recursiveFileLookup": "true", "ignoreCorruptFiles": "true"}
    schema = from_arrow_schema(SPOOL_SCHEMA, prefer_timestamp_ntz=False)
    return spark.read.schema(schema).options(**options).parquet(directory)
