"""Turn a batch of input rows into slices of rows to annotate: find the rows left, claim the output, recover, write.

The rows that are left are searched for once, and not at all if a dead run of the same job had recorded them. If few
rows are left or wanted, only their ids, or hashes of their content, are compared with the output's, before the claim;
they are compared again only if another commit landed in between. The engines begin to load as soon as it is certain
that a row is left.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from pipemax_spark.errors import JobFailedError
from pipemax_spark.job.early_start import EarlyStart
from pipemax_spark.job.fit import check_rows_fit
from pipemax_spark.job.outcomes import AppendedOutcomes, Outcomes, ReplacingOutcomes, StagedOutcomes, written
from pipemax_spark.job.recovery import SpoolRecovery
from pipemax_spark.job.resuming import Resuming
from pipemax_spark.options import JobOptions
from pipemax_spark.report.terminal import Terminal
from pipemax_spark.rows.annotated import ANNOTATION, annotated_schema
from pipemax_spark.rows.checked import Checked
from pipemax_spark.rows.chunks import SlicedRows
from pipemax_spark.rows.incremental import Batch
from pipemax_spark.rows.left import keys_left_by_content, number_of_rows, rows_of_keys
from pipemax_spark.rows.remaining import Remaining
from pipemax_spark.rows.slicing import Slices, Slicing
from pipemax_spark.rows.workdir import LeftRun, WorkDirectory
from pipemax_spark.rows.written_rows import WrittenRows, which_rows
from pipemax_spark.spark.sql import quoted
from pipemax_spark.storage.fence import Claim
from pipemax_spark.storage.output_table import OutputTable

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_CLEARLY_LEFT = 0.05
"""A share of the input: if more than this is left, the rows are written without a search before the claim."""
_SMALL_BATCH_ROWS = 500_000
"""The ids of this many rows, or the hashes of their content, take about 50 MB in each executor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """The recorded rows of a batch that are left, and the right to commit their outcomes."""

    rows: SlicedRows
    num_left: int
    """The number of rows that were left, including those beyond ``--limit``."""
    claim: Claim
    outcomes: Outcomes
    reusable: WrittenRows | None
    """Facts with which the next run can use the rows that are left of these, if that is possible."""


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
        self,
        spark: "SparkSession",
        options: JobOptions,
        terminal: Terminal,
        *,
        table: OutputTable,
        run_id: str,
        checked: Checked,
        work: WorkDirectory,
        engines: EarlyStart,
        is_empty: bool,
    ) -> None:
        """Prepare for ``table``, which holds no annotated rows if ``is_empty``."""
        self._spark = spark
        self._options = options
        self._terminal = terminal
        self._table = table
        self._run_id = run_id
        self._checked = checked
        self._work = work
        self._engines = engines
        self._is_empty = is_empty
        self._claim: Claim | None = None
        self._slicing = Slicing(spark, options, checked, work)
        self._remaining = remaining_of(table, options, checked)
        self.recovered_runs: list[str] = []
        """The dead runs of which rows were committed."""
        self.next_chunk = 0
        """The number of the run's next chunk. Rows that are recovered are chunks, too; the caller counts the others."""

    def prepare(self, number: int, batch: Batch, rows: int, *, held: int = 0) -> Prepared | None:
        """Record the rows left of the run's batch ``number``, which has ``rows`` rows; return None if none are left.

        ``held`` is the number of the input's rows that are not in the batch because the output holds them.
        Raise ``JobFailedError`` if another run takes the output over, or the input has changed meanwhile, and
        ``JobError`` if the output does not take these rows.
        """
        batch = replace(batch, is_small=batch.stream is not None and rows <= _SMALL_BATCH_ROWS)
        which = which_rows(self._spark, self._options, self._checked)
        resuming = None if which is None else self._resuming(which)
        was_claimed = self._claim is not None
        found = _Left(expected=rows) if resuming is not None else self._find_left(number, batch, rows)
        if found is None:
            return None
        # From here on no earlier run can commit, so the rows that are left no longer change.
        claim = self._claimed()
        outcomes = self._outcomes()
        slices = None
        if resuming is not None:
            slices = resuming.slices_left(number, partial(self._commit_spool, number, claim, outcomes))
        if slices is None:
            if not (found.version is not None and (was_claimed or claim.directly_follows(found.version))):
                known = rows if self._is_empty and batch.stream is None else None
                left = self._remaining.left(batch, None if self._is_empty else self._remaining.done())
                found = _Left(expected=found.expected, rows=left, known=known)
            found = self._recover(number, found, claim, outcomes)
            if found.known is not None and found.known > 0:
                self._engines.begin()
            slices = self._slices_anew(number, found)
        sliced = self._sliced(slices)
        if sliced is None:
            return None
        num_left = sliced.rows if slices.num_left is None else slices.num_left
        self._terminal.say(
            "Output",
            f"{self._table.name}: {held + rows - num_left:,} rows done earlier, {sliced.rows:,} to do",
        )
        if not self._is_empty:
            tell_changed(self._terminal, self._remaining, sliced.read_all())
        self._is_empty = False
        reusable = None
        if which is not None:
            earlier = slices.earlier_runs
            reusable = WrittenRows.of(sliced, which=which, epoch=claim.epoch, earlier_runs=earlier)
        return Prepared(rows=sliced, num_left=num_left, claim=claim, outcomes=outcomes, reusable=reusable)

    def _resuming(self, which: str) -> Resuming | None:
        return Resuming.of(
            which,
            table=self._table,
            work=self._work,
            terminal=self._terminal,
            engines=self._engines,
            slicing=self._slicing,
        )

    def _find_left(self, number: int, batch: Batch, rows: int) -> _Left | None:
        """Find the rows that are left; return None if there are none.

        Start the engines once it is certain that there are.

        No claim is needed for this, so a run that finds nothing to do leaves the table as it is. If few rows are left
        or wanted, this step finds and records their keys, and no later step searches for them again.
        """
        ids, limit = self._checked.id_columns, self._options.limit
        has_spools = bool(self._spools())  # dead runs may have completed all rows that are left
        if not rows:
            return None
        if self._is_empty:
            self._engines.begin()
            return _Left(expected=rows)
        version = self._table.version()
        done = self._remaining.done(version)
        if batch.stream is None:
            # Ids are unique, and without ids rows are counted, so at least this many rows are left. More are left if
            # the output holds rows that the input no longer has; if few are left, it is worth knowing how many.
            at_least: int = rows - done.count()
            if at_least > 0 and not has_spools:
                self._engines.begin()
            if at_least > rows * _CLEARLY_LEFT and limit is None:
                return _Left(expected=at_least)
        elif not (batch.is_small and ids):
            return _Left(expected=rows)
        if ids:
            keys = self._remaining.left(batch, done).select(*map(quoted, ids))
        else:
            keys = keys_left_by_content(batch.rows, done)
        keys = written(self._spark, keys, self._work.rows_path(number, "keys"))
        known = wanted = number_of_rows(keys, ids)
        if not known:
            return None
        if not has_spools:
            self._engines.begin()
        if limit is not None and not has_spools:
            keys, wanted = keys.limit(limit), min(known, limit)
        left = rows_of_keys(batch.rows, keys, ids, are_few=wanted <= _SMALL_BATCH_ROWS)
        return _Left(expected=known, rows=left, known=known, version=version)

    def _claimed(self) -> Claim:
        if self._claim is None:
            options = self._options
            schema = annotated_schema(self._checked.schema, ANNOTATION, options.generation, options.ask)
            self._claim = Claim.take(self._table, self._run_id, schema=schema)
            # Between this run's creation of the table and its claim, another run may have filled the table.
            self._is_empty = self._is_empty and self._remaining.held().isEmpty()
        return self._claim

    def _outcomes(self) -> Outcomes:
        options = self._options
        if self._is_empty or not (options.retry_errors or options.redo_changed):
            if self._table.takes_one_append_at_a_time:
                return StagedOutcomes(self._table, self._work.outcomes_path)
            return AppendedOutcomes(self._table)
        outcomes = ReplacingOutcomes(
            self._spark,
            self._table,
            spec_hash=self._checked.spec.hash,
            id_columns=self._checked.id_columns,
            directory=self._work.outcomes_path,
            errors_only=not options.redo_changed,
        )
        if options.retry_errors:
            self._terminal.say(
                "Retry",
                f"{outcomes.num_error_rows():,} error rows from earlier runs; each stays until its retry is committed",
            )
        return outcomes

    def _spools(self) -> list[LeftRun]:
        """Return the dead runs that left completions under this spec."""
        runs = self._work.left_runs
        return [run for run in runs if run.has_spool and run.spec_hash == self._checked.spec.hash]

    def _recover(self, number: int, found: _Left, claim: Claim, outcomes: Outcomes) -> _Left:
        """Commit the rows that dead runs had completed under this spec, and return the rows that are left after that.

        A stream's first batch with rows left is the one that the dead runs had not finished.
        """
        assert found.rows is not None, "what is left is known once the output is claimed"
        spools = self._spools()
        if spools:
            # Each spool is compared with the rows that are left, and so are the rows to annotate after it.
            left = written(self._spark, found.rows, self._work.rows_path(number, "left"))
            known = int(left.count())
            if not known:  # a batch that a dead run had committed: the spool is of a later one
                return _Left(expected=0, rows=left, known=0)
            for run in spools:
                num_rows, left = self._commit_spool(number, claim, outcomes, run, left)
                known -= num_rows
            found = _Left(expected=known, rows=left, known=known)
        self._work.drop_left_runs()
        return found

    def _commit_spool(
        self, number: int, claim: Claim, outcomes: Outcomes, run: LeftRun, left: "DataFrame"
    ) -> "tuple[int, DataFrame]":
        """Commit those of the rows that the run's spool has completed; return their number and the others."""
        recovery = SpoolRecovery(
            spark=self._spark,
            request_columns=self._options.request_columns,
            id_columns=self._checked.id_columns,
            plan=self._checked.plan,
            claim=claim,
            outcomes=outcomes,
            terminal=self._terminal,
        )
        chunk = self.next_chunk
        self.next_chunk += 1
        path = self._work.rows_path(number, f"recovered-{chunk}")
        num_rows, left = recovery.commit(left, run, chunk=chunk, path=path)
        self._is_empty = self._is_empty and num_rows == 0
        if num_rows:
            self.recovered_runs.append(run.run_id)
        return num_rows, left

    def _slices_anew(self, number: int, found: _Left) -> Slices:
        """Record the rows that are left, up to ``--limit``."""
        limit, left, expected, known = self._options.limit, found.rows, found.expected, found.known
        assert left is not None, "what is left is known once the output is claimed"
        if known == 0:
            return Slices(spans=())
        if limit is not None:
            known = left.count() if known is None else known
            # A limit may take other rows when Spark recomputes it, so it is computed once.
            left = written(self._spark, left.limit(limit), self._work.rows_path(number, "limited"))
            expected = min(known, limit)
        span = self._slicing.write(number, left, expected)
        return Slices(spans=(span,), rows=None if known is None else expected, num_left=known)

    def _sliced(self, slices: Slices) -> SlicedRows | None:
        """Return the rows of the slices, after checking that all are there and fit the output.

        None if there are none.
        """
        if not slices.spans:
            return None
        rows = self._slicing.read(slices.spans)
        if slices.rows is not None and rows.rows != slices.rows:
            raise JobFailedError(
                f"{slices.rows:,} rows were to be recorded and {rows.rows:,} were: the input "
                f"{self._checked.source.name!r} has changed since the job began, or files of the work directory were "
                "lost. Nothing was annotated"
            )
        check_rows_fit(self._table, self._options.request_columns.for_output(rows.read_all()))
        return rows if rows.rows else None


def remaining_of(table: OutputTable, options: JobOptions, checked: Checked) -> Remaining:
    """Return the object that finds the rows left of a job's batches."""
    return Remaining(table=table, options=options, spec_hash=checked.spec.hash, id_columns=checked.id_columns)


def tell_changed(terminal: Terminal, remaining: Remaining, rows: "DataFrame") -> None:
    """With ``--redo-changed``, print how many of the rows left have changed since they were annotated."""
    if remaining.options.redo_changed:
        num_rows = remaining.num_changed(rows)
        terminal.say(
            "Redo",
            f"{num_rows:,} rows have changed since they were annotated; each old row stays until its new one is "
            "committed",
        )
