"""Decide which rows a run has to do: which input rows count, and which of them the output holds under the spec.

Only the output table decides. ``left`` compares two sets of rows; this module says which rows these are under the job's
options, and ``written_rows`` which of them a dead run had recorded. A job asks only this module.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipemax_spark.errors import JobError, first_line
from pipemax_spark.executor.requests import KEY_COLUMN
from pipemax_spark.options import JobOptions
from pipemax_spark.request.columns import without_request_columns
from pipemax_spark.rows.annotated import ANNOTATION, holds_annotations
from pipemax_spark.rows.checked import Checked
from pipemax_spark.rows.chunks import SlicedRows
from pipemax_spark.rows.incremental import Batch
from pipemax_spark.rows.left import keys_left_by_content, number_of_rows, rows_left, rows_of_keys
from pipemax_spark.rows.workdir import LeftRun
from pipemax_spark.rows.written_rows import DeadRun, WrittenRows, rows_hash
from pipemax_spark.spark.helper_columns import name_in
from pipemax_spark.spark.sql import quoted
from pipemax_spark.storage.output_table import OutputTable

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


def rows_where(rows: "DataFrame", predicate: str | None) -> "DataFrame":
    """Return the rows that the SQL predicate selects, or all. Raise ``JobError`` for a predicate that is wrong."""
    from pyspark.errors import PySparkException

    if predicate is None:
        return rows
    try:
        chosen = rows.where(predicate)
        _ = chosen.isStreaming  # a question: over Spark Connect nothing is looked at before one
        return chosen
    except PySparkException as error:
        raise JobError(
            f"--where {predicate!r} is not a condition on the input: {first_line(error)}"
        ) from error


@dataclass(frozen=True, slots=True)
class Remaining:
    """Finds the rows that are left of a job's batches."""

    table: OutputTable
    options: JobOptions
    checked: Checked

    def is_annotated(self) -> bool:
        """Tell whether the output exists and may hold annotated rows."""
        return self.table.exists() and holds_annotations(self.table.read().schema)

    def holds_nothing(self) -> bool:
        """Tell whether the output, which exists, holds no annotated row of any spec."""
        return self.table.read().where(f"{ANNOTATION}.spec_hash IS NOT NULL").isEmpty()

    def held(self, version: int | None = None) -> "DataFrame":
        """Return the output's rows under the spec, at this version of the table or at the present one."""
        rows = self.table.read(version=self.table.version() if version is None else version)
        return rows.where(f"{ANNOTATION}.spec_hash = '{self.checked.spec.hash}'")

    def done(self, version: int | None = None) -> "DataFrame":
        """Return those of the held rows that need not be done again unless they have changed."""
        done = self.held(version)
        return done.where(f"{ANNOTATION}.error.code IS NULL") if self.options.retry_errors else done

    def done_if_any(self) -> "DataFrame | None":
        """Return the result of ``done()``, or None for an output that holds no annotated rows."""
        return self.done() if self.is_annotated() else None

    def left(self, batch: Batch, done: "DataFrame | None" = None) -> "DataFrame":
        """Return the batch's rows that are left. ``done`` is the result of ``done()``, or None for an empty output."""
        from pyspark.sql import functions as F  # noqa: N812

        rows, names = batch.rows, self.checked.id_columns
        if done is None or not (self.options.redo_changed or batch.finds_changed):
            return rows_left(rows, done, names, whole=batch.whole, are_few=batch.is_small)
        if batch.part is not None:  # the requests of no other rows need be known
            asked = rows.select(*map(quoted, names))
            done = done.join(F.broadcast(asked) if batch.is_small else asked, list(names), "left_semi")
        # A row counts as done while the output's row of the same ids makes the same request.
        columns = self.options.request_columns
        keyed, done = columns.add_with_keys(rows), columns.add_with_keys(done)
        key = name_in(KEY_COLUMN, keyed.columns)
        ids = [*map(F.col, map(quoted, names)), F.col(name_in(KEY_COLUMN, done.columns)).alias(key)]
        left = rows_left(keyed, done.select(*ids), (*names, key))
        return without_request_columns(left).select(*map(quoted, rows.columns))

    def without(self, rows: "DataFrame", committed: "DataFrame") -> "DataFrame":
        """Return the rows without those that were just committed."""
        return rows_left(rows, committed, self.checked.id_columns)

    def keys_left(self, batch: Batch, done: "DataFrame") -> "DataFrame":
        """Return the ids of the batch's rows that are left or, without ids, hashes of their content."""
        ids = self.checked.id_columns
        if not ids:
            return keys_left_by_content(batch.rows, done)
        return self.left(batch, done).select(*map(quoted, ids))

    def num_rows(self, keys: "DataFrame") -> int:
        """Return how many rows the result of ``keys_left`` stands for."""
        return number_of_rows(keys, self.checked.id_columns)

    def rows_of(self, batch: Batch, keys: "DataFrame", *, are_few: bool) -> "DataFrame":
        """Return the batch's rows of these keys, which all tasks get if they ``are_few``."""
        return rows_of_keys(batch.rows, keys, self.checked.id_columns, are_few=are_few)

    def num_changed(self, rows: "DataFrame") -> int:
        """Count those of the rows that are left whose ids are done: their requests have changed since."""
        names = self.checked.id_columns
        ids = self.done().select(*map(quoted, names))
        return rows.join(ids, on=list(names), how="left_semi").count()

    def recorded_by(self, dead_runs: Sequence[LeftRun]) -> DeadRun | None:
        """Return the dead run that had recorded the rows that are left, or None; see ``written_rows``."""
        known = rows_hash(self.options, self.checked)
        return None if known is None else DeadRun.with_rows(known, dead_runs)

    def recorded(self, rows: SlicedRows, *, epoch: int, earlier_runs: tuple[str, ...]) -> WrittenRows | None:
        """Return what a later run must know to use the recorded rows; None if it could not be sure of them."""
        known = rows_hash(self.options, self.checked)
        if known is None:
            return None
        return WrittenRows(
            rows_hash=known,
            epoch=epoch,
            spans=rows.spans,
            slice_rows=rows.slice_rows,
            earlier_runs=earlier_runs,
        )
