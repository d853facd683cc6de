"""Recover the rows that a dead run had completed but not committed: its spool, joined with the rows that are left."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import pyarrow as pa

from pipemax.wire import COMPLETION_SCHEMA
from pipemax_spark.errors import CommitRefusedError, TakenOverError
from pipemax_spark.executor.requests import KEY_COLUMN
from pipemax_spark.executor.spool import KEY, SPOOL_SCHEMA
from pipemax_spark.executor.task import Annotator, QuestionAnnotator, TaskPlan
from pipemax_spark.job.job import Job
from pipemax_spark.job.outcomes import Outcomes, written
from pipemax_spark.request.columns import without_request_columns
from pipemax_spark.rows.annotated import annotated_schema
from pipemax_spark.rows.row_identity import occurrence
from pipemax_spark.rows.workdir import LeftRun
from pipemax_spark.spark.helper_columns import map_rows, name_in
from pipemax_spark.spark.sql import quoted
from pipemax_spark.storage.fence import Claim
from pipemax_spark.storage.hadoop import LITERAL_PATH

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_COMPLETION, _OCCURRENCE = "__pipemax_completion", "__pipemax_occurrence"


@dataclass(frozen=True, slots=True)
class SpoolRecovery:
    """Commits what dead runs had completed, for one run that has claimed the output."""

    job: Job
    claim: Claim
    outcomes: Outcomes

    def commit(self, left: "DataFrame", run: LeftRun, *, chunk: int, path: str) -> "tuple[int, DataFrame]":
        """Commit those of the rows ``left`` that the run's spool has completed; return their number and the others.

        ``chunk`` is an unused chunk number, ``path`` a directory for the rows in transit.
        """
        job, plan, columns = self.job, self.job.checked.plan, self.job.options.request_columns
        keyed = columns.for_output(without_request_columns(columns.add_with_keys(left)))
        rows = spooled_rows(job.spark, keyed, run, questions=len(plan.questions))
        spooled = written(job.spark, rows, path)
        transaction = self.claim.recovery(chunk, dead_run_id=run.run_id)
        try:
            rows_kept = self.outcomes.commit(annotated_rows(spooled, run, plan=plan), transaction)
        except CommitRefusedError as error:
            raise TakenOverError(self.claim.taken_over()) from error
        num_rows: int = spooled.count()
        self.claim.landed(transaction, expected_rows=num_rows + rows_kept)
        job.terminal.say("", f"{num_rows:,} rows that run {run.run_id} had completed were committed now")
        return num_rows, job.remaining.without(left, without_completions(spooled))


def spooled_rows(
    spark: "SparkSession", left: "DataFrame", run: LeftRun, *, questions: int = 0
) -> "DataFrame":
    """Return the rows that the run's spool has completed, each with its completion.

    With ``questions``, a row is complete if the spool has the completions of all of them; it gets an array of them.

    ``left`` is the input's rows that the table lacks, with their keys. A completion serves one row, and a row takes one
    completion: of equal rows, as many are done as the spool holds.
    """
    from pyspark.sql import functions as F  # noqa: N812

    names = (name_in(helper, left.columns) for helper in (KEY_COLUMN, _OCCURRENCE, _COMPLETION))
    key, place, answer = names
    known = _completions(spark, run.spool_path)
    completion = F.struct(*(F.col(quoted(name)) for name in COMPLETION_SCHEMA.names)).alias(_COMPLETION)
    known = known.select(F.col(KEY).alias(KEY_COLUMN), occurrence(KEY).alias(_OCCURRENCE), completion)
    if questions:
        known = _whole_rows(known, questions)
    known = known.toDF(key, place, answer)
    pairs = left.withColumn(place, occurrence(key)).join(known, [key, place])
    columns = [pairs[quoted(name)] for name in left.columns if name != key]
    return pairs.select(*columns, answer)


def without_completions(spooled: "DataFrame") -> "DataFrame":
    """Return the rows of ``spooled_rows`` without their completions."""
    return spooled.drop(name_in(_COMPLETION, spooled.columns))


def annotated_rows(spooled: "DataFrame", run: LeftRun, *, plan: TaskPlan) -> "DataFrame":
    """Return the rows of ``spooled_rows`` with their annotations, which name the run that computed them."""
    task = RecallTask(replace(plan, run_id=run.run_id))
    schema = annotated_schema(
        without_completions(spooled).schema,
        plan.output_column,
        plan.options.generation,
        plan.questions,
        names_model=plan.answered_by is not None,
    )
    return map_rows(spooled, task, schema)


@dataclass(frozen=True, slots=True)
class RecallTask:
    """The function of ``mapInArrow``: rows with their completions in, annotated rows out."""

    plan: TaskPlan

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        annotator = Annotator(self.plan)
        for batch in batches:
            completions = batch.column(_COMPLETION)
            count = len(self.plan.questions)
            if count:
                places = [range(question, count * batch.num_rows, count) for question in range(count)]
                flat = completions.flatten()
                answers = [_completion_batch(flat.take(pa.array(numbers, pa.int64()))) for numbers in places]
                columns = QuestionAnnotator(self.plan).columns(answers)
            else:
                columns = {self.plan.output_column: annotator.annotations(_completion_batch(completions))}
            rows = batch.drop_columns([_COMPLETION])
            yield pa.RecordBatch.from_arrays(
                [*rows.columns, *columns.values()], names=[*rows.schema.names, *columns]
            )


def _completion_batch(completions: pa.StructArray) -> pa.RecordBatch:
    parts = pa.RecordBatch.from_struct_array(completions)
    return pa.RecordBatch.from_arrays(
        [parts.column(field.name).cast(field.type) for field in COMPLETION_SCHEMA], schema=COMPLETION_SCHEMA
    )


def _whole_rows(known: "DataFrame", questions: int) -> "DataFrame":
    """Return the keys of rows with the completions of all questions, in the questions' order."""
    from pyspark.sql import functions as F  # noqa: N812

    parts = F.split(KEY_COLUMN, ":")
    numbered = known.select(
        parts[0].alias(KEY_COLUMN),
        _OCCURRENCE,
        F.struct(parts[1].cast("int").alias("question"), F.col(_COMPLETION).alias("completion")).alias(
            "answer"
        ),
    )
    gathered = numbered.groupBy(KEY_COLUMN, _OCCURRENCE).agg(F.collect_list("answer").alias("answers"))
    in_order = F.array_sort("answers", lambda a, b: a["question"] - b["question"])
    completions = F.transform(in_order, lambda answer: answer["completion"]).alias(_COMPLETION)
    return gathered.where(F.size("answers") == questions).select(KEY_COLUMN, _OCCURRENCE, completions)


def _completions(spark: "SparkSession", directory: str) -> "DataFrame":
    from pyspark.sql.pandas.types import from_arrow_schema

    # A file that was torn when the run died is skipped, and its rows are done again.
    options = {"recursiveFileLookup": "true", "ignoreCorruptFiles": "true"}
    schema = from_arrow_schema(SPOOL_SCHEMA, prefer_timestamp_ntz=False)
    return spark.read.schema(schema).options(**options, **LITERAL_PATH).parquet(directory)
