"""The annotation job, step by step: read, check, determine what is left, run it in chunks, report.

The rows come in batches: the whole input is one batch, and a stream has as many as it has to read. Whatever ends a run,
the next run finds what is left from the output table only.
"""

import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING

from pipemax_spark.errors import CanaryError, IfRunning, LimitReachedError, OtherRunError, TooManyErrorsError
from pipemax_spark.job.batches import batches_of, check_appended, chosen_rows, counted_rows
from pipemax_spark.job.canary import do_rows
from pipemax_spark.job.checks import check_job
from pipemax_spark.job.deleted import with_mark
from pipemax_spark.job.dry_run import dry_run
from pipemax_spark.job.early_start import EarlyStart
from pipemax_spark.job.job import Job, JobCall, new_run_id
from pipemax_spark.job.limits import RunLimits
from pipemax_spark.job.preparing import Prepared, Preparing
from pipemax_spark.job.record import (
    EndRecord,
    compact,
    conclude,
    nothing_delivered,
    nothing_to_do,
    stopped,
)
from pipemax_spark.job.run import Run, begun_run
from pipemax_spark.job.settings import job_settings
from pipemax_spark.job.worth_a_try import worth_a_try
from pipemax_spark.options import JobOptions
from pipemax_spark.report.summary import Summary
from pipemax_spark.report.terminal import Terminal
from pipemax_spark.request.prompts import find_field
from pipemax_spark.rows.annotated import holds_annotations, output_schema
from pipemax_spark.rows.checked import Checked
from pipemax_spark.rows.incremental import Batch, reading
from pipemax_spark.rows.prompt_order import Finding
from pipemax_spark.rows.workdir import WorkDirectory, usable_work_base
from pipemax_spark.storage.executor_files import files_of
from pipemax_spark.storage.hadoop import check_storage
from pipemax_spark.storage.names import is_path
from pipemax_spark.storage.openai_batch import ID_COLUMN as BATCH_ID
from pipemax_spark.storage.openai_batch import errors_path, write_answers
from pipemax_spark.storage.output_table import OutputTable, open_table
from pipemax_spark.storage.spec_properties import spec_property, spec_texts

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.types import StructType


class AnnotationJob:
    """One run of the job."""

    def __init__(
        self,
        spark: "SparkSession",
        options: JobOptions,
        terminal: Terminal,
        *,
        table: OutputTable | None = None,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """Prepare a run, from which on its limits count. ``table`` is the output, for a caller that already has it.

        ``clock_s`` is what the limits go by. Raise ``JobError`` if ``done_by`` has passed.
        """
        self.run_id = new_run_id()
        self._limits = RunLimits(options, clock_s=clock_s)
        output = files_of(spark).qualified(options.output) if is_path(options.output) else options.output
        table = table or open_table(spark, output)
        self._call = JobCall(spark=spark, options=options, terminal=terminal, table=table, run_id=self.run_id)
        self._findings: list[Finding] | None = None
        self._seen_version: int | None = None
        self._end = EndRecord(self._call)

    def run(self) -> Summary | None:
        """Run the job and return its summary, or None after a dry run.

        A run that its limits have ended returns its summary too. Raise ``JobError`` for what the user can fix, and
        ``JobFailedError`` if the job stopped itself.
        """
        spark, options = self._call.spark, self._call.options
        with job_settings(spark):
            if options.dry_run:
                if options.summary is not None:
                    check_storage(options.summary, spark, option="summary")
                dry_run(self._call, self._checked(), self._limits)
                return None
            try:
                with self._end:
                    self._end.summary = self._run()
            except OtherRunError as error:
                if options.if_running is not IfRunning.SKIP:
                    raise
                self._call.terminal.say("Skipped", f"{error.args[0]} (--if-running skip)")
            except (
                LimitReachedError
            ):  # only the work directory needs to know: it keeps what is left for the next run
                assert self._end.summary is not None, "the run has concluded"
            return self._end.summary

    def _checked(self) -> Checked:
        with self._call.terminal.doing("checking the input, the output and the model"):
            return check_job(self._call)

    def _run(self) -> Summary:
        call, options = self._call, self._call.options
        if options.incremental or options.redo_changed:
            # Before the input is read: see ``Preparing``.
            self._seen_version = call.table.version() if call.table.exists() else -1
        checked = self._checked()
        if not options.incremental:
            self._end.counts.rows_in = checked.rows_in
        if checked.source.is_blank and not call.table.exists():
            return nothing_delivered(call)
        is_empty = made_output(call, checked)
        base = usable_work_base(call.spark, options.work_dir, call.table.location())
        with WorkDirectory(
            files_of(call.spark),
            base,
            table_id=call.table.table_id(),
            run_id=self.run_id,
            say=call.terminal.warn,
            takes_over=options.if_running is IfRunning.TAKE_OVER,
        ) as work:
            job = Job.of(call, checked, work)
            limit = None
            try:
                run = self._annotated(job, is_empty=is_empty)
            except LimitReachedError as error:
                run, limit = self._end.run, error
            counts = self._end.counts
            if run is None:
                summary, reason = nothing_to_do(job, counts)
            else:
                if options.compact and limit is None:
                    compact(job)
                summary, reason = conclude(job, run, counts, worth_a_try=self._findings or (), limit=limit)
            self._end.summary = summary
            if options.batch_output is not None:
                _write_batch_output(job, options.batch_output, rows_left=counts.left_out + counts.undone)
            if reason is not None:
                raise TooManyErrorsError(reason)
            if limit is not None:
                raise limit
            return summary

    def _annotated(self, job: Job, *, is_empty: bool) -> Run | None:
        """Do the same as ``_annotate``, and write the page of a run that its errors or its canary has stopped."""
        try:
            return self._annotate(job, is_empty=is_empty)
        except (TooManyErrorsError, CanaryError) as error:
            if self._end.run is not None:
                stopped(job, self._end.run, self._end.counts, reason=str(error))
            raise

    def _annotate(self, job: Job, *, is_empty: bool) -> Run | None:
        """Annotate and count all batches; return the run, or None if there were no rows to annotate."""
        counts, run, new_rows = self._end.counts, None, 0
        counts.rows_in = 0
        if (certified := job.options.certified) is not None:
            counts.skipped, counts.left_out = certified.rows_skipped, certified.rows_left_out
            counts.rows_in = counts.skipped + counts.left_out
        with ExitStack() as stack, batches_of(job) as batches:
            engines = stack.enter_context(EarlyStart(job.spark, job.checked.plan.options))
            preparing = Preparing(job, engines, is_empty=is_empty, seen_version=self._seen_version)
            for number, batch in enumerate(map(partial(chosen_rows, job), batches)):
                with reading(job.checked.source.name, batch):
                    rows = counted_rows(job, batch)
                new_rows += rows
                prepared = self._prepared(job, preparing, batch, rows)
                if prepared is None:
                    continue
                if run is None:  # these are the first rows to do
                    run = self._end.run = stack.enter_context(begun_run(job, prepared, self._limits))
                    run.warn_of_limit = self._end.warn_of_limit
                    self._end.notifier.start(rows_left=(counts.to_do or 0) + counts.left_out)
                preparing.next_chunk = do_rows(job, run, prepared)
                counts.done += prepared.rows.rows
                job.work.delete_rows(number)
            job.work.drop_left_runs()
            counts.recovered_runs = preparing.recovered_runs
            if new_rows == 0 and job.options.incremental:
                check_appended(job, 0)
        return run

    def _prepared(self, job: Job, preparing: Preparing, batch: Batch, rows: int) -> Prepared | None:
        """Prepare and count a batch of ``rows`` rows; return None if none of them is left."""
        counts = self._end.counts
        held = job.checked.rows_in - rows if batch.counts_all else 0
        counts.rows_in += rows + held
        counts.skipped += held
        with job.terminal.doing("looking for the rows that are left"):
            prepared = preparing.prepare(batch, rows, held=held)
        counts.reused, counts.deleted = preparing.reused, preparing.deleted
        if prepared is None:
            counts.skipped += rows
            return None
        to_do = prepared.rows.rows
        counts.skipped += rows - prepared.num_left
        counts.left_out += prepared.num_left - to_do
        counts.to_do = (counts.to_do or 0) + to_do
        if not job.options.group_by_prefix and self._findings is None:
            self._findings = worth_a_try(job.options, job.checked, batch.rows, rows, of_template=False)
        return prepared


def made_output(call: JobCall, checked: Checked) -> bool:
    """Create the table, or add what it lacks; return True if it is new or has no annotations yet.

    All changes of its schema happen here: during a running chunk they would make the chunk retry its commit.
    """
    table = call.table
    schema = with_mark(output_schema(checked.schema, call.options), call.options.on_delete)
    is_new = not table.exists()
    is_empty = is_new or not holds_annotations(table.read().schema)
    if is_new:
        table.create(schema)
    is_known = not is_new and checked.spec.hash in spec_texts(table.properties())
    # A later version of this project may have given the annotation another field.
    if not is_new and (not is_known or _lacks_any(table.read().schema, schema)):
        table.add_columns(schema)
    if not is_known:
        table.set_properties(spec_property(checked.spec.hash, checked.spec.to_json(), call.run_id))
    return is_empty


def _lacks_any(held: "StructType", wanted: "StructType") -> bool:
    """Tell whether a column of ``wanted``, or a field of one that is a struct, is missing."""
    from pyspark.sql.types import StructType

    for field in wanted.fields:
        same = find_field(field.name, held)
        if same is None:
            return True
        match field.dataType, same.dataType:
            case StructType() as inner, StructType() as of_table if _lacks_any(of_table, inner):
                return True
    return False


def _write_batch_output(job: Job, path: str, *, rows_left: int) -> None:
    """Write the input's rows as OpenAI's output files once all of them are done."""
    if rows_left:
        job.terminal.say("Answers", f"{rows_left:,} rows are left, so {path} is not written yet")
        return
    asked = job.checked.source.rows.select(BATCH_ID)
    rows = job.remaining.held().join(asked, on=BATCH_ID, how="left_semi")
    num_good, num_bad = write_answers(rows, path, model=job.checked.reply.model)
    errors = f", {num_bad:,} errors in {errors_path(path)}" if num_bad else ""
    job.terminal.say("Answers", f"{num_good:,} in {path}{errors}")
