"""Turn a batch of input rows into slices of rows to annotate: find the rows left, claim the output, recover, write.

The rows that are left are searched for once, and not at all if a dead run of the same job had recorded them. If few
rows are left or wanted, only their ids, or hashes of their content, are compared with the output's, before the claim;
they are compared again only if another commit landed in between. The engines begin to load as soon as it is certain
that a row is left.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from pipemax_spark.errors import JobFailedError, TakenOverError
from pipemax_spark.job.deleted import DeletedRows
from pipemax_spark.job.early_start import EarlyStart
from pipemax_spark.job.fit import check_rows_fit
from pipemax_spark.job.job import Job
from pipemax_spark.job.outcomes import (
    AppendedOutcomes,
    OldRows,
    Outcomes,
    ReplacingOutcomes,
    StagedOutcomes,
    written,
)
from pipemax_spark.job.recovery import SpoolRecovery
from pipemax_spark.job.replacing import (
    begin_replacing,
    has_superseded,
    num_error_rows,
    old_rows,
    say_replaced,
)
from pipemax_spark.job.resuming import resuming_of
from pipemax_spark.job.reuse import Reuse, Reused
from pipemax_spark.rows.annotated import output_schema
from pipemax_spark.rows.chunks import SlicedRows
from pipemax_spark.rows.id_columns import FEW_ROWS
from pipemax_spark.rows.incremental import Batch
from pipemax_spark.rows.order_by import first_rows, order_of
from pipemax_spark.rows.slicing import Slices, Slicing
from pipemax_spark.rows.workdir import LeftRun
from pipemax_spark.rows.written_rows import WrittenRows
from pipemax_spark.storage.fence import Claim, committed_since

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_CLEARLY_LEFT = 0.05
"""A share of the input: if more than this is left, the rows are written without a search before the claim."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """The recorded rows of a batch that are left, and the right to commit their outcomes."""

    rows: SlicedRows
    num_left: int
    """The number of rows that were left, including those beyond ``--limit``."""
    claim: Claim
    outcomes: Outcomes
    first_chunk: int = 0
    """The number of the run's next chunk: a number stands for one chunk of a run."""
    origin: str = ""
    """Ends the notes of the commits."""
    reusable: WrittenRows | None = None
    """Facts with which the next run can use the rows that are left of these, if that is possible."""
    parts: tuple[SlicedRows, ...] = ()
    """With ``--canary`` the canary's rows and the others; empty if all rows are done as one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Left:
    """Facts about the rows that are left of a batch."""

    expected: int
    """Their approximate number."""
    rows: "DataFrame | None" = None
    """The rows, or with ``--limit`` enough of them; None until the output is claimed, unless they were searched for."""
    known: int | None = None
    """The exact number of rows that are left, if it is known."""
    version: int | None = None
    """The version of the output in which they were searched for."""


class Preparing:
    """Prepares the batches of one run, one after the other."""

    def __init__(
        self, job: Job, engines: EarlyStart, *, is_empty: bool, seen_version: int | None = None
    ) -> None:
        """Prepare for the job's output, which holds no annotated rows if ``is_empty``.

        ``seen_version`` is the output's version before the input was read, where rows that changed in the input replace
        others: another run that committed since may have read a later state of the input, and its rows must stay.
        """
        self._job = job
        self._seen_version = seen_version
        self._engines = engines
        self._is_empty = is_empty
        self._claim: Claim | None = None
        self._old: OldRows | None = None
        """The rows of the output that this run's rows replace; None until they are looked for."""
        self._slicing = Slicing(job.spark, job.options, job.checked, job.work)
        self._remaining = job.remaining
        self._number = -1
        """The batch's number, counted from 0."""
        self._reuse = Reuse.of(job, job.checked)
        self.reused = Reused()
        """What was taken over from the table of ``--reuse``."""
        self.deleted = 0
        """Rows of the output that were marked or removed, because the input has deleted theirs."""
        self.recovered_runs: list[str] = []
        """The dead runs of which rows were committed."""
        self.next_chunk = 0
        """The number of the run's next chunk. Rows that are recovered are chunks, too; the caller counts the others."""

    def prepare(self, batch: Batch, rows: int, *, held: int = 0) -> Prepared | None:
        """Record the rows left of the run's next batch, which has ``rows`` rows; return None if none are left.

        ``held`` is the number of the input's rows that are not in the batch because the output holds them.
        Raise ``JobFailedError`` if another run takes the output over, or the input has changed meanwhile, and
        ``JobError`` if the output does not take these rows.
        """
        self._number += 1
        batch = replace(batch, is_small=batch.part is not None and rows <= FEW_ROWS)
        if not self._is_empty:
            claimed = partial(self._claimed, batch)
            self.deleted += DeletedRows(self._job, claimed, self._next_number).settle(batch)
        resuming = resuming_of(self._job)
        was_claimed = self._claim is not None
        left = _Left(expected=rows) if resuming is not None else self._find_left(batch, rows)
        if left is None:
            if self._old is None and has_superseded(self._job):
                self._outcomes(self._claimed(batch), batch, None)
            return None
        # From here on no earlier run can commit, so the rows that are left no longer change.
        claim = self._claimed(batch)
        is_known = left.version is not None and (was_claimed or claim.directly_follows(left.version))
        if not is_known and resuming is None:
            left = self._searched(batch, rows, left.expected)
        outcomes = self._outcomes(claim, batch, left.rows)
        slices = None
        if resuming is not None:
            commit_spool = partial(self._commit_spool, claim, outcomes)
            slices = resuming.slices_left(self._number, self._slicing, self._engines, commit_spool)
        if slices is None:
            if left.rows is None:
                left = self._searched(batch, rows, left.expected)
            left = self._take_over(self._recover(left, claim, outcomes), claim, outcomes)
            if left.known is not None and left.known > 0:
                self._engines.begin()
            slices = self._new_slices(left)
        sliced = self._sliced(slices)
        if sliced is None:
            return None
        num_left = sliced.rows if slices.num_left is None else slices.num_left
        self._job.terminal.say(
            "Output",
            f"{self._job.table.name}: {held + rows - num_left:,} rows done earlier, {sliced.rows:,} to do",
        )
        if not self._is_empty:
            changed = batch.finds_changed
            say_replaced(self._job, self._remaining, sliced.read_all(), finds_changed=changed)
        self._is_empty = False
        return Prepared(
            rows=sliced,
            num_left=num_left,
            claim=claim,
            outcomes=outcomes,
            first_chunk=self.next_chunk,
            origin="" if batch.part is None else f" of {batch.part}",
            reusable=self._remaining.recorded(sliced, epoch=claim.epoch, earlier_runs=slices.earlier_runs),
            parts=self._parts(slices),
        )

    def _searched(self, batch: Batch, rows: int, expected: int) -> _Left:
        """Return the rows that are left of a batch of ``rows`` rows, once the output is claimed."""
        known = rows if self._is_empty and batch.part is None else None
        searched = self._remaining.left(batch, None if self._is_empty else self._remaining.done())
        return _Left(expected=expected, rows=searched, known=known)

    def _find_left(self, batch: Batch, rows: int) -> _Left | None:
        """Find the rows that are left; return None if there are none.

        Start the engines once it is certain that there are.

        No claim is needed for this, so a run that finds nothing to do leaves the table as it is. If few rows are left
        or wanted, this step finds and records their keys, and no later step searches for them again.
        """
        remaining, limit = self._remaining, self._job.options.limit
        # Dead runs, or an earlier table, may have answers for all rows that are left.
        may_be_answered = bool(self._spools()) or self._reuse is not None
        if not rows:
            return None
        if self._is_empty:
            if self._reuse is None:
                self._engines.begin()
            return _Left(expected=rows)
        version = self._job.table.version()
        done = remaining.done(version)
        if batch.whole is None:
            # Ids are unique, and without ids rows are counted, so at least this many rows are left. More are left if
            # the output holds rows that the input no longer has; if few are left, it is worth knowing how many.
            at_least: int = rows - done.count()
            if at_least > 0 and not may_be_answered:
                self._engines.begin()
            if at_least > rows * _CLEARLY_LEFT and limit is None:
                return _Left(expected=at_least)
        elif not (batch.is_small and self._job.checked.id_columns):
            return _Left(expected=rows)
        keys = self._written("keys", remaining.keys_left(batch, done))
        known = wanted = remaining.num_rows(keys)
        if not known:
            return None
        if not may_be_answered:
            self._engines.begin()
        if limit is not None and not may_be_answered and self._job.options.order_by is None:
            keys, wanted = keys.limit(limit), min(known, limit)
        left = remaining.rows_of(batch, keys, are_few=wanted <= FEW_ROWS)
        return _Left(expected=known, rows=left, known=known, version=version)

    def _written(self, kind: str, rows: "DataFrame") -> "DataFrame":
        return written(self._job.spark, rows, self._job.work.rows_path(self._number, kind))

    def _claimed(self, batch: Batch) -> Claim:
        if self._claim is None:
            options = self._job.options
            schema = output_schema(self._job.checked.schema, options)
            remark = self._job.checked.unique_ids
            self._claim = Claim.take(self._job.table, self._job.run_id, schema=schema, remark=remark)
            if batch.finds_changed or options.redo_changed:
                self._check_not_overtaken()
            # Between this run's creation of the table and its claim, another run may have filled the table.
            self._is_empty = self._is_empty and self._remaining.holds_nothing()
        return self._claim

    def _check_not_overtaken(self) -> None:
        """Raise ``JobFailedError`` if another run has committed since the input was read."""
        assert self._seen_version is not None, "changed rows replace others"
        table, run_id = self._job.table, self._job.run_id
        if (other := committed_since(table, self._seen_version, besides=run_id)) is not None:
            raise TakenOverError(
                f"run {other} has committed to {table.name} since this run has read what changed in the input, and "
                "may have read a later state of it; run the same command again"
            )

    def _next_number(self) -> int:
        self.next_chunk += 1
        return self.next_chunk - 1

    def _outcomes(self, claim: Claim, batch: Batch, left: "DataFrame | None") -> Outcomes:
        """Return how the outcomes of the rows that are ``left`` of a batch are committed."""
        job = self._job
        if not self._is_empty and self._old is None:
            changed = batch.finds_changed and left is not None and self._remaining.num_changed(left) > 0
            self._old = old_rows(job, changed=changed)
            if self._old.other_specs:
                begin_replacing(job, claim, self._old, number=self._next_number())
            if self._old.errors:
                job.terminal.say(
                    "Retry",
                    f"{num_error_rows(job):,} error rows from earlier runs; each stays until its retry is committed",
                )
        if self._old is not None and self._old.any:
            return ReplacingOutcomes.of(job, self._old)
        if job.table.takes_one_append_at_a_time:
            return StagedOutcomes(job.table, job.work.outcomes_path)
        return AppendedOutcomes(job.table)

    def _spools(self) -> list[LeftRun]:
        """Return the dead runs that left completions under this spec."""
        spec_hash = self._job.checked.spec.hash
        return [run for run in self._job.work.left_runs if run.has_spool and run.spec_hash == spec_hash]

    def _recover(self, left: _Left, claim: Claim, outcomes: Outcomes) -> _Left:
        """Commit the rows that dead runs had completed under this spec, and return the rows that are left after that.

        A stream's first batch with rows left is the one that the dead runs had not finished.
        """
        assert left.rows is not None, "what is left is known once the output is claimed"
        spools = self._spools()
        if spools:
            # Each spool is compared with the rows that are left, and so are the rows to annotate after it.
            rows = self._written("left", left.rows)
            known = int(rows.count())
            if not known:  # a batch that a dead run had committed: the spool is of a later one
                return _Left(expected=0, rows=rows, known=0)
            for run in spools:
                num_rows, rows = self._commit_spool(claim, outcomes, run, rows)
                known -= num_rows
            left = _Left(expected=known, rows=rows, known=known)
        self._job.work.drop_left_runs()
        return left

    def _take_over(self, left: _Left, claim: Claim, outcomes: Outcomes) -> _Left:
        """Commit the rows that the table of ``--reuse`` answers, and return the rows that are left after that."""
        if self._reuse is None or left.known == 0:
            return left
        assert left.rows is not None, "what is left is known once the output is claimed"
        chunk = self.next_chunk
        self.next_chunk += 1
        path = self._job.work.rows_path(self._number, f"reused-{chunk}")
        reused, rows, known = self._reuse.commit(left.rows, claim, outcomes, chunk=chunk, path=path)
        self.reused += reused
        self._is_empty = self._is_empty and reused.rows == 0
        if self._job.options.certified is None:
            source = f"took answers of {self._job.options.reuse} ({reused.tokens:,} tokens)"
        else:
            source = "keep the small answer or were sampled"
        self._job.terminal.say("Reuse", f"{reused.rows:,} rows {source}; {known:,} are left")
        return _Left(expected=known, rows=rows, known=known)

    def _commit_spool(
        self, claim: Claim, outcomes: Outcomes, run: LeftRun, left: "DataFrame"
    ) -> "tuple[int, DataFrame]":
        """Commit those of the rows that the run's spool has completed; return their number and the others."""
        chunk = self.next_chunk
        self.next_chunk += 1
        path = self._job.work.rows_path(self._number, f"recovered-{chunk}")
        num_rows, left = SpoolRecovery(self._job, claim, outcomes).commit(left, run, chunk=chunk, path=path)
        self._is_empty = self._is_empty and num_rows == 0
        if num_rows:
            self.recovered_runs.append(run.run_id)
        return num_rows, left

    def _new_slices(self, left: _Left) -> Slices:
        """Record the rows that are left, up to ``--limit``."""
        limit, rows, expected, known = self._job.options.limit, left.rows, left.expected, left.known
        assert rows is not None, "what is left is known once the output is claimed"
        if known == 0:
            return Slices(spans=())
        if limit is not None:
            known = rows.count() if known is None else known
            # A limit may take other rows when Spark recomputes it, so it is computed once.
            order = order_of(self._job.spark, self._job.options.order_by)
            rows = self._written("limited", first_rows(rows, order, limit))
            expected = min(known, limit)
        spans = self._slicing.write_with_canary(self._number, rows, expected)
        return Slices(spans=spans, rows=None if known is None else expected, num_left=known)

    def _sliced(self, slices: Slices) -> SlicedRows | None:
        """Return the rows of the slices, after checking that all are there and fit the output.

        None if there are none.
        """
        if not slices.spans:
            return None
        rows = slices.sliced or self._slicing.read(slices.spans)
        if slices.rows is not None and rows.rows != slices.rows:
            raise JobFailedError(
                f"{slices.rows:,} rows were to be recorded and {rows.rows:,} were: the input "
                f"{self._job.checked.source.name!r} has changed since the job began, or files of the work directory "
                "were lost. Nothing was annotated"
            )
        columns = self._job.options.request_columns
        check_rows_fit(self._job.table, columns.for_output(rows.read_all()))
        return rows if rows.rows else None

    def _parts(self, slices: Slices) -> tuple[SlicedRows, ...]:
        """Return the rows of a canary and the others; nothing if either has none, or there is no canary."""
        if self._job.options.canary is None or len(slices.spans) != 2:
            return ()
        parts = tuple(self._slicing.read([span]) for span in slices.spans)
        return parts if all(part.rows for part in parts) else ()
