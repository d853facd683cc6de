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

from pipemax_spark.dataframe import ANNOTATION, annotated_schema
from pipemax_spark.errors import CommitRefusedError, JobFailedError
from pipemax_spark.job.checks import Checked, check_job
from pipemax_spark.job.chunks import SlicedRows, number_of_slices, write_slices
from pipemax_spark.job.dry_run import print_dry_run
from pipemax_spark.job.fit import check_rows_fit
from pipemax_spark.job.incremental import Batch, MicroBatches, stream_purpose
from pipemax_spark.job.left import check_ids, identity
from pipemax_spark.job.options import JobOptions
from pipemax_spark.job.outcomes import AppendedOutcomes, Outcomes, ReplacingOutcomes, StagedOutcomes, written
from pipemax_spark.job.output import is_annotated, make_output
from pipemax_spark.job.prefix import PrefixShare, sample_by_beginning, shared_prefixes
from pipemax_spark.job.record import RowCounts, RunRecord
from pipemax_spark.job.recovery import spooled_rows
from pipemax_spark.job.remaining import Remaining, rows_where
from pipemax_spark.job.run import Run, begun_run
from pipemax_spark.job.settings import job_settings
from pipemax_spark.job.workdir import WorkDirectory, work_base
from pipemax_spark.monitor.findings import CommittedTotals, totals_of_run
from pipemax_spark.monitor.summary import Summary
from pipemax_spark.monitor.terminal import Terminal
from pipemax_spark.request_columns import prompt_text, without_request_columns
from pipemax_spark.slots import other_slots, slots_of
from pipemax_spark.sql import quoted
from pipemax_spark.storage.fence import Claim
from pipemax_spark.storage.hadoop import HadoopFiles, check_storage
from pipemax_spark.storage.tables import DeltaTable, is_path

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_SMALL_BATCH_ROWS = 500_000
"""So many rows' ids, or the hashes of their content, are some 50 MB in each executor."""


class AnnotationJob:
    """One run of the job."""

    def __init__(
        self,
        spark: "SparkSession",
        options: JobOptions,
        terminal: Terminal,
        *,
        table: DeltaTable | None = None,
    ) -> None:
        """Prepare a run. ``table`` is the output, for a caller that already has it."""
        self._spark = spark
        self._options = options
        self._terminal = terminal
        self.run_id = f"{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}-{uuid.uuid4().hex[:8]}"
        self._files = HadoopFiles(spark)
        output = self._files.qualified(options.output) if is_path(options.output) else options.output
        self._table = table or DeltaTable(spark, output)
        self._is_empty = False
        self._claim: Claim | None = None
        self._prefixes: PrefixShare | None = None

    def run(self) -> Summary | None:
        """Run the job and return its summary, or None after a dry run.

        Raise ``JobError`` for what the user can fix, and ``JobFailedError`` if the job stopped itself.
        """
        with job_settings(self._spark):
            return self._run()

    def _run(self) -> Summary | None:
        options = self._options
        if options.summary is not None:
            check_storage(options.summary, self._spark, option="summary")
        checked = check_job(self._spark, options, self._table, run_id=self.run_id, terminal=self._terminal)
        if options.dry_run:
            self._dry_run(checked)
            return None
        self._is_empty = make_output(self._table, checked, options.generation, self.run_id)
        record = self._record(checked)
        base = work_base(options.work_dir, self._table.location())
        table_id = self._table.table_id()
        with WorkDirectory(
            self._files, base, table_id=table_id, run_id=self.run_id, say=self._terminal.warn
        ) as work:
            with ExitStack() as stack, self._batches(checked, work) as batches:
                counts, run = self._do_batches(checked, work, batches, stack)
                if run is not None:
                    engines, prefix_hit_rate = run.engines, run.prefix_cache_hit_rate
            if run is not None:
                if options.compact:
                    record.compact()
                totals = totals_of_run(self._table, self.run_id)
                summary = record.summarise(counts, run.seconds, engines, totals)
                summary = replace(summary, policies=run.policies, prefix_cache_hit_rate=prefix_hit_rate)
                reason = record.too_many_errors(totals)
                advice = None if self._prefixes is None else self._prefixes.advice
                status = "FAILED" if reason else "FINISHED"
                summary = record.conclude(summary, run, totals, advice=advice, status=status)
            else:
                reason = record.too_many_errors(CommittedTotals())
                summary = record.nothing_to_do(counts)
            if reason is not None:
                raise JobFailedError(reason)
            return summary

    def _dry_run(self, checked: Checked) -> None:
        self._is_empty = not is_annotated(self._table)
        left = self._left(checked, Batch(rows=checked.source.rows))
        if self._table.exists():
            check_rows_fit(self._table, left.select(*map(quoted, checked.schema.names)))
        self._tell_changed(checked, left)
        print_dry_run(
            self._terminal,
            rows_in=checked.rows_in,
            rows_left=left.count(),
            limit=self._options.limit,
            reply=checked.reply,
            max_tokens=self._options.generation.max_tokens,
            output=self._table.name,
            shows_prompt=not self._options.no_sample,
        )

    # The output, and what is left.

    def _batches(self, checked: Checked, work: WorkDirectory) -> AbstractContextManager[Iterable[Batch]]:
        options = self._options
        if not options.incremental:
            return nullcontext([Batch(rows=checked.source.rows)])
        return MicroBatches(
            self._spark,
            checked.source,
            checkpoints=options.checkpoint or work.checkpoints_path,
            purpose=stream_purpose(checked.spec.hash, options.where),
            options=options.input_option,
            skip_changes=options.skip_changes,
        )

    def _do_batches(
        self, checked: Checked, work: WorkDirectory, batches: Iterable[Batch], stack: ExitStack
    ) -> tuple[RowCounts, Run | None]:
        """Annotate all batches; return what became of the rows, and the run, or None if there were no rows to do.

        The run is entered into ``stack`` when the first rows to do are found.
        """
        counts, run, next_chunk = RowCounts(), None, 0
        for number, batch in enumerate(batches):
            if batch.stream is not None:
                batch = self._chosen(batch)
            rows = self._rows_of(checked, batch)
            counts.rows_in += rows
            batch = replace(batch, is_small=batch.stream is not None and rows <= _SMALL_BATCH_ROWS)
            expected = self._expected_left(checked, batch, rows)
            if not expected:
                counts.skipped += rows
                continue
            # From here on no earlier run can commit, so what is left does not change any more.
            claim = self._claimed(checked)
            outcomes = self._outcomes(checked, work)
            next_chunk = self._recover(checked, work, batch, claim, outcomes, first_chunk=next_chunk)
            sliced, left = self._fix_rows(checked, work.rows_path(number), batch, rows, expected)
            counts.skipped += rows - left
            counts.left_out += left - sliced.rows
            if not sliced.rows:
                continue
            self._terminal.say(
                "Output", f"{self._table.name}: {rows - left:,} rows done before, {sliced.rows:,} to do"
            )
            self._tell_changed(checked, sliced.read_all())
            self._is_empty = False
            if not self._options.group_by_prefix and self._prefixes is None:
                self._prefixes = self._shared_prefixes(batch, rows)
            if run is None:
                run = stack.enter_context(self._begun(checked, work))
            origin = "" if batch.stream is None else f" of {batch.stream}"
            next_chunk = run.do(sliced, claim, outcomes, first_chunk=next_chunk, origin=origin)
            counts.done += sliced.rows
            work.delete_rows(number)
        work.drop_left_spools()
        return counts, run

    def _record(self, checked: Checked) -> RunRecord:
        return RunRecord(
            spark=self._spark,
            options=self._options,
            terminal=self._terminal,
            table=self._table,
            run_id=self.run_id,
            checked=checked,
        )

    def _begun(self, checked: Checked, work: WorkDirectory) -> AbstractContextManager[Run]:
        record = self._record(checked)
        return begun_run(
            self._spark,
            self._options,
            self._terminal,
            table=self._table,
            plan=checked.plan,
            work=work,
            params=record.params(),
            manifest=record.manifest(),
            expected_rows=checked.reply.expected_rows,
        )

    def _claimed(self, checked: Checked) -> Claim:
        if self._claim is None:
            schema = annotated_schema(checked.schema, ANNOTATION, self._options.generation)
            self._claim = Claim.take(self._table, self.run_id, schema=schema)
            # Between this run's creation of the table and its claim, another run may have filled the table.
            self._is_empty = self._is_empty and self._remaining(checked).held().isEmpty()
        return self._claim

    def _expected_left(self, checked: Checked, batch: Batch, rows: int) -> int:
        """Return about how many rows are left; 0 only if none is left.

        No claim is needed for this, so a run that finds nothing to do leaves the table as it is.
        """
        if self._is_empty or batch.stream is not None:
            return rows
        return self._remaining(checked).expected(batch, rows)

    def _outcomes(self, checked: Checked, work: WorkDirectory) -> Outcomes:
        options = self._options
        if self._is_empty or not (options.retry_errors or options.redo_changed):
            if self._table.takes_one_append_at_a_time:
                return StagedOutcomes(self._table, work.outcomes_path)
            return AppendedOutcomes(self._table)
        outcomes = ReplacingOutcomes(
            self._spark,
            self._table,
            spec_hash=checked.spec.hash,
            id_columns=checked.id_columns,
            directory=work.outcomes_path,
            errors_only=not options.redo_changed,
        )
        if options.retry_errors:
            self._terminal.say(
                "Retry",
                f"{outcomes.num_error_rows():,} error rows of earlier runs; each stays until its new outcome is in",
            )
        return outcomes

    def _tell_changed(self, checked: Checked, rows: "DataFrame") -> None:
        """Say how many of the rows that are to be done have changed since they were done, with ``--redo-changed``."""
        if self._options.redo_changed and not self._is_empty:
            num_rows = self._remaining(checked).num_changed(rows)
            self._terminal.say(
                "Redo",
                f"{num_rows:,} rows have changed since they were done; each old row stays until its new outcome is in",
            )

    def _shared_prefixes(self, batch: Batch, rows: int) -> PrefixShare:
        requests = self._options.request_columns.add(batch.rows)
        return shared_prefixes(sample_by_beginning(requests, prompt_text(requests), rows_in=rows))

    def _rows_of(self, checked: Checked, batch: Batch) -> int:
        if batch.stream is None:
            return checked.rows_in
        if checked.id_columns:
            check_ids(batch.rows, checked.id_columns, shows_values=not self._options.no_sample)
        rows: int = batch.rows.count()
        condition = "" if self._options.where is None else f" where {self._options.where}"
        self._terminal.say(
            "Stream", f"batch {batch.stream.batch_id}: {rows:,} rows{condition} were appended to the input"
        )
        return rows

    def _chosen(self, batch: Batch) -> Batch:
        """Return the batch's rows that ``--where`` takes, of the same rows of the whole input."""
        where = self._options.where
        whole = None if batch.whole is None else rows_where(batch.whole, where)
        return replace(batch, rows=rows_where(batch.rows, where), whole=whole)

    def _remaining(self, checked: Checked) -> Remaining:
        return Remaining(
            table=self._table,
            options=self._options,
            spec_hash=checked.spec.hash,
            id_columns=checked.id_columns,
        )

    def _left(self, checked: Checked, batch: Batch) -> "DataFrame":
        remaining = self._remaining(checked)
        return remaining.left(batch, None if self._is_empty else remaining.done())

    def _fix_rows(
        self, checked: Checked, path: str, batch: Batch, rows_in: int, expected: int
    ) -> tuple[SlicedRows, int]:
        """Write the rows that are left, up to ``--limit``; return them, and how many rows are left in all.

        ``expected`` is about how many rows are left.
        """
        from pyspark.sql import functions as F  # noqa: N812

        options, schema = self._options, checked.source.rows.schema
        slots = slots_of(self._spark).total
        left = self._left(checked, batch)
        known = rows_in if self._is_empty and batch.stream is None else None
        if options.limit is not None:
            known = left.count() if known is None else known
            # A limit may take other rows when Spark recomputes it, so it is computed once.
            left = written(self._spark, left.limit(options.limit), f"{path}-limited")
            expected = min(known, options.limit)
        slices = number_of_slices(expected, slots)
        identity_columns = list(checked.id_columns) or list(schema.names)
        write_slices(
            options.request_columns.add_with_keys(left),
            path,
            identity=F.expr(identity(identity_columns)),
            slices=slices,
            slots=other_slots(self._spark),
            by_prefix=options.group_by_prefix,
        )
        rows = SlicedRows(self._spark, path, schema, slices=slices, by_prefix=options.group_by_prefix)
        if known is not None and rows.rows != expected:
            raise JobFailedError(
                f"{expected:,} rows were to be written down and {rows.rows:,} were: the input {checked.source.name!r} "
                "has changed since the job began, or files of the work directory were lost. Nothing was annotated"
            )
        check_rows_fit(self._table, options.request_columns.for_output(rows.read_all()))
        return rows, rows.rows if known is None else known

    def _recover(
        self,
        checked: Checked,
        work: WorkDirectory,
        batch: Batch,
        claim: Claim,
        outcomes: Outcomes,
        *,
        first_chunk: int,
    ) -> int:
        """Commit what dead runs had completed of these rows under this spec; return the next chunk's number.

        A stream's first batch is the one that the dead runs had not finished.
        """
        next_chunk = first_chunk
        for spool in work.left_spools:
            if spool.spec_hash != checked.spec.hash:
                continue
            left = self._options.request_columns.add_with_keys(self._left(checked, batch))
            transaction = claim.recovery(next_chunk, dead_run_id=spool.run_id)
            next_chunk += 1
            left = self._options.request_columns.for_output(without_request_columns(left))
            rows = spooled_rows(self._spark, left, spool, plan=checked.plan)
            try:
                rows_kept = outcomes.commit(rows, transaction)
            except CommitRefusedError as error:
                raise JobFailedError(claim.taken_over()) from error
            rows_added = claim.landed(transaction).rows
            num_rows = None if rows_added is None else rows_added - rows_kept
            self._is_empty = self._is_empty and num_rows == 0
            count = "rows" if num_rows is None else f"{num_rows:,} rows"
            self._terminal.say("", f"{count} that run {spool.run_id} had completed were committed now")
        work.drop_left_spools()
        return next_chunk
