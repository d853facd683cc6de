"""Recover the rows that a dead run had completed but not committed: its spool, joined with the rows that are left."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import pyarrow as pa

from pipemax.wire import COMPLETION_SCHEMA
from pipemax_spark.dataframe import annotated_schema
from pipemax_spark.errors import CommitRefusedError, JobFailedError
from pipemax_spark.executor.spool import KEY, SPOOL_SCHEMA
from pipemax_spark.executor.task import KEY_COLUMN, Annotator, TaskPlan
from pipemax_spark.job.left import occurrence, rows_left
from pipemax_spark.job.outcomes import Outcomes, written
from pipemax_spark.job.workdir import LeftRun
from pipemax_spark.monitor.terminal import Terminal
from pipemax_spark.request_columns import RequestColumns, without_request_columns
from pipemax_spark.sql import quoted
from pipemax_spark.storage.fence import Claim

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_COMPLETION, _OCCURRENCE = "__pipemax_completion", "__pipemax_occurrence"


@dataclass(frozen=True, slots=True, kw_only=True)
class SpoolRecovery:
    """Commits what dead runs had completed, for one run that has claimed the output."""

    spark: "SparkSession"
    request_columns: RequestColumns
    id_columns: tuple[str, ...]
    plan: TaskPlan
    claim: Claim
    outcomes: Outcomes
    terminal: Terminal

    def commit(self, left: "DataFrame", run: LeftRun, *, chunk: int, path: str) -> "tuple[int, DataFrame]":
        """Commit those of the rows ``left`` that the run's spool has completed; return their number and the others.

        ``chunk`` is an unused chunk number, ``path`` a directory for the rows in transit.
        """
        columns = self.request_columns
        keyed = columns.for_output(without_request_columns(columns.add_with_keys(left)))
        spooled = written(self.spark, spooled_rows(self.spark, keyed, run), path)
        transaction = self.claim.recovery(chunk, dead_run_id=run.run_id)
        try:
            rows_kept = self.outcomes.commit(annotated_rows(spooled, run, plan=self.plan), transaction)
        except CommitRefusedError as error:
            raise JobFailedError(self.claim.taken_over()) from error
        num_rows: int = spooled.count()
        self.claim.landed(transaction, expected_rows=num_rows + rows_kept)
        self.terminal.say("", f"{num_rows:,} rows that run {run.run_id} had completed were committed now")
        return num_rows, rows_left(left, without_completions(spooled), self.id_columns)


def spooled_rows(spark: "SparkSession", left: "DataFrame", run: LeftRun) -> "DataFrame":
    """Return the rows that the run's spool has completed, each with its completion.

    ``left`` is the input's rows that the table lacks, with their keys. A completion serves one row, and a row takes one
    completion: of equal rows, as many are done as the spool holds.
    """
    from pyspark.sql import functions as F  # noqa: N812

    known = _completions(spark, run.spool_path)
    completion = F.struct(*(F.col(quoted(name)) for name in COMPLETION_SCHEMA.names)).alias(_COMPLETION)
    known = known.select(F.col(KEY).alias(KEY_COLUMN), occurrence(KEY).alias(_OCCURRENCE), completion)
    pairs = left.withColumn(_OCCURRENCE, occurrence(KEY_COLUMN)).join(known, [KEY_COLUMN, _OCCURRENCE])
    columns = [pairs[quoted(name)] for name in left.columns if name != KEY_COLUMN]
    return pairs.select(*columns, _COMPLETION)


def without_completions(spooled: "DataFrame") -> "DataFrame":
    """Return the rows of ``spooled_rows`` without their completions."""
    return spooled.drop(_COMPLETION)


def annotated_rows(spooled: "DataFrame", run: LeftRun, *, plan: TaskPlan) -> "DataFrame":
    """Return the rows of ``spooled_rows`` with their annotations, which name the run that computed them."""
    task = RecallTask(replace(plan, run_id=run.run_id))
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
