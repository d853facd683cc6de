"""Take over the rows that a dead run of the same job had recorded, so that nothing is prepared twice.

Slices of committed chunks are done. Those of chunks that were in flight may be half done: the rows that the dead run
had completed are committed now, and their other rows are recorded again. All other slices are used unchanged and in
place; the dead run's directory stays until they are done.
"""

import contextlib
from collections.abc import Callable, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipemax_spark.job.early_start import EarlyStart
from pipemax_spark.job.job import Job
from pipemax_spark.rows.chunks import SlicedRows, pick_slices
from pipemax_spark.rows.slicing import Slices, Slicing
from pipemax_spark.rows.workdir import LeftRun
from pipemax_spark.rows.written_rows import Committed, DeadRun

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    CommitSpool = Callable[[LeftRun, DataFrame], tuple[int, DataFrame]]
    """Commits those of the rows that a run's spool has completed; returns their number and the other rows."""


@dataclass(frozen=True, slots=True)
class Resuming:
    """Takes over from one dead run."""

    job: Job
    dead: DeadRun

    def slices_left(
        self, number: int, slicing: Slicing, engines: EarlyStart, commit_spool: "CommitSpool"
    ) -> Slices | None:
        """Commit what the dead run had completed, and return the slices that are left of its rows.

        Call it once the output is claimed: from then on the dead run commits no more. ``number`` is that of this run's
        batch. Return None, and commit nothing, if what is left must be looked for after all.
        """
        dead, rows = self.dead, self.dead.rows
        committed = dead.committed(self.job.table)
        if committed is None:
            return None
        left = set(range(len(rows.slice_rows))) - committed.slices
        sliced = self._read(left, slicing) if left else None
        if sliced is None:
            return None
        num_left = sum(rows.slice_rows[place] for place in left)
        self.job.terminal.say(
            "Resume",
            f"{num_left:,} of the rows that run {dead.run.run_id} had prepared are left; this run uses them as they "
            "are",
        )
        in_flight = left & self._in_flight(committed)
        if in_flight != left:
            engines.begin()
        spans = pick_slices(rows.spans, left - in_flight)
        if in_flight:
            begun = slicing.read(pick_slices(rows.spans, in_flight))
            num_done, rest = commit_spool(dead.run, begun.read_input())
            num_left -= num_done
            if num_done < begun.rows:
                engines.begin()
                spans.insert(0, slicing.write(number, rest, begun.rows - num_done))
        self.job.work.drop_left_spools()
        earlier_runs = (dead.run.run_id, *rows.earlier_runs)
        sliced = None if in_flight else sliced
        return Slices(spans=tuple(spans), rows=num_left, earlier_runs=earlier_runs, sliced=sliced)

    def _in_flight(self, committed: Committed) -> set[int]:
        """Return the slices of which the dead run may have completed some rows without committing them."""
        if not self.dead.run.has_spool:
            return set()
        chunks = self.job.work.noted_chunks(self.dead.run, besides=committed.chunks)
        return {place for chunk in chunks for place in range(chunk.first_slice, chunk.end_slice)}

    def _read(self, slices: Set[int], slicing: Slicing) -> SlicedRows | None:
        """Return the rows of these slices, or None if some of them can no longer be read."""
        from pyspark.errors import AnalysisException

        rows = self.dead.rows
        with contextlib.suppress(AnalysisException):  # a whole directory is gone
            sliced = slicing.read(pick_slices(rows.spans, slices))
            if list(sliced.slice_rows) == [rows.slice_rows[place] for place in sorted(slices)]:
                return sliced
        self.job.terminal.warn(
            f"rows that run {self.dead.run.run_id} had prepared were lost from its work directory, so this run "
            "determines again which rows are left"
        )
        return None


def resuming_of(job: Job) -> Resuming | None:
    """Find the dead run that had recorded the rows that are left.

    Return None if no such run has rows left that are known for certain; then the rows left must be searched for.
    """
    dead = job.remaining.recorded_by(job.work.left_runs)
    committed = None if dead is None else dead.committed(job.table)
    if dead is None or committed is None or len(committed.slices) == len(dead.rows.slice_rows):
        return None
    return Resuming(job, dead)
