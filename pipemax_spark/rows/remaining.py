"""Decide which rows a run has to do: which input rows count, and which of them the output holds under the spec.

``left`` compares two sets of rows; this module says which rows these are under the job's options.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipemax_spark.errors import JobError, first_line
from pipemax_spark.executor.requests import KEY_COLUMN
from pipemax_spark.options import JobOptions
from pipemax_spark.request.columns import without_request_columns
from pipemax_spark.rows.annotated import ANNOTATION
from pipemax_spark.rows.incremental import Batch
from pipemax_spark.rows.left import rows_left
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
        return rows.where(predicate)
    except PySparkException as error:
        raise JobError(
            f"--where {predicate!r} is not a condition on the input: {first_line(error)}"
        ) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Remaining:
    """Finds the rows that are left of a batch."""

    table: OutputTable
    options: JobOptions
    spec_hash: str
    id_columns: tuple[str, ...]

    def held(self, version: int | None = None) -> "DataFrame":
        """Return the output's rows under the spec, at this version of the table or at the present one."""
        rows = self.table.read(version=self.table.version() if version is None else version)
        return rows.where(f"{ANNOTATION}.spec_hash = '{self.spec_hash}'")

    def done(self, version: int | None = None) -> "DataFrame":
        """Return those of the held rows that need not be done again unless they have changed."""
        done = self.held(version)
        return done.where(f"{ANNOTATION}.error.code IS NULL") if self.options.retry_errors else done

    def left(self, batch: Batch, done: "DataFrame | None") -> "DataFrame":
        """Return the batch's rows that are left. ``done`` is the result of ``done()``, or None for an empty output."""
        from pyspark.sql import functions as F  # noqa: N812

        rows, names = batch.rows, self.id_columns
        if done is None or not self.options.redo_changed:
            return rows_left(rows, done, names, whole=batch.whole, are_few=batch.is_small)
        # A row counts as done while the output's row of the same ids makes the same request.
        columns = self.options.request_columns
        keyed, done = columns.add_with_keys(rows), columns.add_with_keys(done)
        key = name_in(KEY_COLUMN, keyed.columns)
        ids = [*map(F.col, map(quoted, names)), F.col(name_in(KEY_COLUMN, done.columns)).alias(key)]
        left = rows_left(keyed, done.select(*ids), (*names, key))
        return without_request_columns(left).select(*map(quoted, rows.columns))

    def num_changed(self, rows: "DataFrame") -> int:
        """Count those of the rows that are left whose ids are done: their requests have changed since."""
        ids = self.done().select(*map(quoted, self.id_columns))
        return rows.join(ids, on=list(self.id_columns), how="left_semi").count()
