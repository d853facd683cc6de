"""The annotation job, step by step: read, check, determine what is left, run it in chunks, report.

The rows come in batches: the whole input is one batch, and a stream has as many as it has to read. Whatever ends a run,
the next run finds what is left from the output table only.
"""

import time
import uuid
from collections.abc import Iterable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING

from pipemax_spark.errors import IfRunning, OtherRunError, TooManyErrorsError
from pipemax_spark.job.checks import check_job
from pipemax_spark.job.dry_run import print_dry_run
from pipemax_spark.job.early_start import EarlyStart
from pipemax_spark.job.end_record import EndRecord
from pipemax_spark.job.fit import check_rows_fit
from pipemax_spark.job.kept_values import check_values_kept
from pipemax_spark.job.output import is_annotated, make_output
from pipemax_spark.job.preparing import Preparing, remaining_of, tell_changed
from pipemax_spark.job.record import RunRecord
from pipemax_spark.job.run import Run, begun_run
from pipemax_spark.job.settings import job_settings
from pipemax_spark.options import JobOptions
from pipemax_spark.report.findings import totals_of_run
from pipemax_spark.report.summary import Summary
from pipemax_spark.report.terminal import Terminal
from pipemax_spark.request.columns import prompt_text
from pipemax_spark.rows.checked import Checked
from pipemax_spark.rows.incremental import Batch, MicroBatches, reading, stream_purpose
from pipemax_spark.rows.left import check_ids
from pipemax_spark.rows.prefix import PrefixShare, sample_by_beginning, shared_prefixes
from pipemax_spark.rows.remaining import rows_where
from pipemax_spark.rows.workdir import WorkDirectory, work_base
from pipemax_spark.rows.written_rows import WrittenRows
from pipemax_spark.spark.sql import quoted
from pipemax_spark.storage.hadoop import HadoopFiles, check_storage
from pipemax_spark.storage.openai_batch import ID_COLUMN as BATCH_ID
from pipemax_spark.storage.openai_batch import errors_path, write_answers
from pipemax_spark.storage.output_table import OutputTable, open_table
from pipemax_spark.storage.tables import is_path

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class AnnotationJob:
    """One run of the job."""

    def __init__(
        self,
        spark: "SparkSession",
        options: JobOptions,
        terminal: Terminal,
        *,
        table: OutputTable | None = None,
    ) -> None:
        """Prepare a run. ``table`` is the output, for a caller that already has it."""
        self._spark = spark
        self._options = options
        self._terminal = terminal
        self.run_id = f"{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}-{uuid.uuid4().hex[:8]}"
        self._files = HadoopFiles(spark)
        output = self._files.qualified(options.output) if is_path(options.output) else options.output
        self._table = table or open_table(spark, output)
        self._prefixes: PrefixShare | None = None
        self._end = EndRecord(spark, options, table=self._table)

    def run(self) -> Summary | None:
        """Run the job and return its summary, or None after a dry run.

        Raise ``JobError`` for what the user can fix, and ``JobFailedError`` if the job stopped itself.
        """
        with job_settings(self._spark):
            if self._options.dry_run:
                if self._options.summary is not None:
                    check_storage(self._options.summary, self._spark, option="summary")
                self._dry_run(self._checked())
                return None
            try:
                with self._end:
                    return self._run()
            except OtherRunError as error:
                if self._options.if_running is not IfRunning.SKIP:
                    raise
                self._terminal.say("Skipped", f"{error.args[0]} (--if-running skip)")
                return self._end.summary

    def _checked(self) -> Checked:
        if "\\n" in (self._options.generation.system or ""):
            self._terminal.warn(
                r"the system message has \n as two characters, not as a line break; in bash, write --system $'…\n…'"
            )
        return check_job(self._spark, self._options, self._table, run_id=self.run_id, terminal=self._terminal)

    def _run(self) -> Summary:
        options = self._options
        checked = self._checked()
        if not options.incremental:
            self._end.counts.rows_in = checked.rows_in
        if checked.source.is_blank and not self._table.exists():
            self._end.summary = self._record(checked).nothing_delivered()
            return self._end.summary
        is_empty = make_output(self._table, checked, options.generation, self.run_id)
        record = self._record(checked)
        base = work_base(options.work_dir, self._table.location())
        check_storage(base, self._spark, option="work-dir")
        table_id = self._table.table_id()
        with WorkDirectory(
            self._files,
            base,
            table_id=table_id,
            run_id=self.run_id,
            say=self._terminal.warn,
            takes_over=options.if_running is IfRunning.TAKE_OVER,
        ) as work:
            with ExitStack() as stack, self._batches(checked, work) as batches:
                run = self._do_batches(checked, work, batches, stack, is_empty=is_empty)
                if run is not None:
                    engines, prefix_hit_rate = run.engines, run.prefix_cache_hit_rate
            counts = self._end.counts
            if run is not None:
                if options.compact:
                    record.compact()
                totals = totals_of_run(self._table, self.run_id)
                reason = record.too_many_errors(totals, counts.recovered_runs)
                summary = record.summarise(
                    counts, run.seconds, engines, totals, has_failed=reason is not None
                )
                summary = replace(summary, policies=run.policies, prefix_cache_hit_rate=prefix_hit_rate)
                advice = None if self._prefixes is None else self._prefixes.advice
                status = "FAILED" if reason else "FINISHED"
                summary = record.conclude(summary, run, totals, advice=advice, status=status)
            else:
                reason = record.too_many_errors(None, counts.recovered_runs)
                summary = record.nothing_to_do(counts, has_failed=reason is not None)
            self._end.summary = summary
            if options.batch_output is not None:
                self._write_batch_output(options.batch_output, checked, rows_left=counts.left_out)
            if reason is not None:
                raise TooManyErrorsError(reason)
            return summary

    def _write_batch_output(self, path: str, checked: Checked, *, rows_left: int) -> None:
        """Write the input's rows as OpenAI's output files once all of them are done."""
        if rows_left:
            self._terminal.say("Answers", f"{rows_left:,} rows are left, so {path} is not written yet")
            return
        rows = remaining_of(self._table, self._options, checked).held()
        asked = checked.source.rows.select(BATCH_ID)
        num_good, num_bad = write_answers(
            rows.join(asked, on=BATCH_ID, how="left_semi"), path, model=checked.reply.model
        )
        errors = f", {num_bad:,} errors in {errors_path(path)}" if num_bad else ""
        self._terminal.say("Answers", f"{num_good:,} in {path}{errors}")

    def _dry_run(self, checked: Checked) -> None:
        remaining = remaining_of(self._table, self._options, checked)
        done = remaining.done() if is_annotated(self._table) else None
        left = remaining.left(Batch(rows=checked.source.rows), done)
        if self._table.exists():
            check_rows_fit(self._table, left.select(*map(quoted, checked.schema.names)))
        if done is not None:
            tell_changed(self._terminal, remaining, left)
        print_dry_run(
            self._terminal,
            rows_in=checked.rows_in,
            rows_left=left.count(),
            limit=self._options.limit,
            reply=checked.reply,
            questions=len(self._options.ask),
            output=self._table.name,
            shows_prompt=not self._options.no_sample,
            has_images=self._options.source.has_images(checked.source.rows.schema),
        )

    # The output, and the rows that are left.

    def _batches(self, checked: Checked, work: WorkDirectory) -> AbstractContextManager[Iterable[Batch]]:
        options = self._options
        if not options.incremental:
            return nullcontext([Batch(rows=checked.source.rows)])
        return MicroBatches(
            self._spark,
            checked.source,
            positions=options.checkpoint or work.checkpoints_path,
            purpose=stream_purpose(checked.spec.hash, options.where),
            stream_directory=f"{work.path}/stream",
            options=options.input_option,
            skip_changes=options.skip_changes,
            rescan=options.rescan,
            say=self._terminal.warn,
        )

    def _do_batches(
        self,
        checked: Checked,
        work: WorkDirectory,
        batches: Iterable[Batch],
        stack: ExitStack,
        *,
        is_empty: bool,
    ) -> Run | None:
        """Annotate and count all batches; return the run, or None if there were no rows to annotate.

        The run is entered into ``stack`` when the first rows to do are found.
        """
        counts, run, new_rows = self._end.counts, None, 0
        counts.rows_in = 0
        preparing = Preparing(
            self._spark,
            self._options,
            self._terminal,
            table=self._table,
            run_id=self.run_id,
            checked=checked,
            work=work,
            engines=stack.enter_context(EarlyStart(self._spark, checked.plan.options)),
            is_empty=is_empty,
        )
        for number, batch in enumerate(batches):
            if self._options.incremental:
                batch = self._chosen(batch)
            if batch.compares_all:
                batch = self._not_held(checked, batch)
            with reading(checked.source.name, batch):
                rows = self._rows_of(checked, batch)
            new_rows += rows
            held = checked.rows_in - rows if batch.counts_all else 0
            counts.rows_in += rows + held
            counts.skipped += held
            prepared = preparing.prepare(number, batch, rows, held=held)
            if prepared is None:
                counts.skipped += rows
                continue
            sliced = prepared.rows
            counts.skipped += rows - prepared.num_left
            counts.left_out += prepared.num_left - sliced.rows
            counts.to_do = (counts.to_do or 0) + sliced.rows
            if not self._options.group_by_prefix and self._prefixes is None:
                self._prefixes = self._shared_prefixes(batch, rows)
            if run is None:
                run = stack.enter_context(self._begun(checked, work, prepared.reusable))
                self._end.run = run
            origin = "" if batch.stream is None else f" of {batch.stream}"
            preparing.next_chunk = run.do(
                sliced, prepared.claim, prepared.outcomes, first_chunk=preparing.next_chunk, origin=origin
            )
            counts.done += sliced.rows
            work.delete_rows(number)
        work.drop_left_runs()
        counts.recovered_runs = preparing.recovered_runs
        if new_rows == 0 and self._options.incremental:
            self._check_appended(0)
        return run

    def _record(self, checked: Checked) -> RunRecord:
        return RunRecord(
            spark=self._spark,
            options=self._options,
            terminal=self._terminal,
            table=self._table,
            run_id=self.run_id,
            checked=checked,
        )

    def _begun(
        self, checked: Checked, work: WorkDirectory, rows: WrittenRows | None
    ) -> AbstractContextManager[Run]:
        record = self._record(checked)
        return begun_run(
            self._spark,
            self._options,
            self._terminal,
            table=self._table,
            plan=checked.plan,
            work=work,
            params=record.params(),
            read=record.read_table(),
            description=record.description(),
            manifest=record.manifest(rows),
            expected_rows=checked.reply.expected_rows,
        )

    def _shared_prefixes(self, batch: Batch, rows: int) -> PrefixShare:
        requests = self._options.request_columns.add(batch.rows)
        return shared_prefixes(sample_by_beginning(requests, prompt_text(requests), rows_in=rows))

    def _rows_of(self, checked: Checked, batch: Batch) -> int:
        if batch.stream is None and not batch.compares_all:
            return checked.rows_in
        if checked.id_columns:
            # A stream reads rows as they were appended, whatever became of them later.
            then = "" if batch.stream is None else ", if the input still has any, and give --rescan once"
            check_ids(batch.rows, checked.id_columns, shows_values=not self._options.no_sample, then=then)
        check_values_kept(
            self._table,
            batch.rows,
            checked.schema,
            checked.id_columns,
            self._options,
            warn=self._terminal.warn,
        )
        rows: int = batch.rows.count()
        if batch.stream is None and not batch.counts_all:
            return rows
        if rows:
            self._check_appended(rows)
        condition = "" if self._options.where is None else f" where {self._options.where}"
        if batch.stream is None:
            self._terminal.say(
                "Compared",
                f"all {checked.rows_in:,} rows{condition} of the input: {rows:,} are not in the output yet",
            )
            return rows
        self._terminal.say(
            "Stream", f"batch {batch.stream.batch_id}: {rows:,} rows{condition} were appended to the input"
        )
        return rows

    def _check_appended(self, rows: int) -> None:
        self._options.check_row_count(rows, source=f"what was appended to input {self._options.input!r}")

    def _not_held(self, checked: Checked, batch: Batch) -> Batch:
        """Return the batch with only the rows that the output lacks: an id may be in the input twice."""
        remaining = remaining_of(self._table, self._options, checked)
        done = remaining.done() if is_annotated(self._table) else None
        return replace(batch, rows=remaining.left(batch, done))

    def _chosen(self, batch: Batch) -> Batch:
        """Return the batch with only the rows that ``--where`` selects, both of the batch and of the whole input."""
        where = self._options.where
        whole = None if batch.whole is None else rows_where(batch.whole, where)
        return replace(batch, rows=rows_where(batch.rows, where), whole=whole)
