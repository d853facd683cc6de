"""Write a job's rows in slices and read them back, by ``chunks`` and the job's options."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipemax_spark.options import JobOptions
from pipemax_spark.rows.checked import Checked
from pipemax_spark.rows.chunks import SlicedRows, SliceSpan, number_of_slices, write_slices
from pipemax_spark.rows.equal_rows import frequent_keys, group_of
from pipemax_spark.rows.order_by import order_of
from pipemax_spark.rows.row_identity import identity
from pipemax_spark.rows.workdir import WorkDirectory
from pipemax_spark.spark.slots import other_slots, slots_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


@dataclass(frozen=True, slots=True, kw_only=True)
class Slices:
    """The recorded rows of a batch that are left."""

    spans: tuple[SliceSpan, ...]
    """Empty if nothing is to be done."""
    rows: int | None = None
    """Their exact number, if it is known beforehand."""
    num_left: int | None = None
    """The number of rows that were left, including those beyond ``--limit``; by default, the rows of the slices."""
    earlier_runs: tuple[str, ...] = ()
    """The dead runs that had recorded some of them."""
    sliced: SlicedRows | None = None
    """Their rows, if they were read already: that counts them, in as many files as there are slices."""


@dataclass(frozen=True, slots=True)
class Slicing:
    """Writes and reads slices in a run's work directory."""

    _spark: "SparkSession"
    _options: JobOptions
    _checked: Checked
    _work: WorkDirectory

    def write_with_canary(self, number: int, rows: "DataFrame", expected: int) -> tuple[SliceSpan, ...]:
        """Do the same as ``write``, with about ``--canary`` of the rows, drawn at random, in slices before the others.

        Whether a row is drawn depends only on its values. All rows are in one span if they are no more than a canary.
        """
        from pyspark.sql import functions as F  # noqa: N812

        wanted = self._options.canary
        if wanted is None or expected <= wanted:
            return (self.write(number, rows, expected),)
        source = self._checked.source.rows
        key = F.expr(identity(source.schema, self._checked.id_columns or source.columns))
        is_drawn = F.pmod(F.xxhash64(key, F.lit(self._checked.plan.run_id)), F.lit(expected)) < wanted
        drawn = self.write(number, rows.where(is_drawn), wanted, kind="canary")
        return drawn, self.write(number, rows.where(~is_drawn), expected - wanted)

    def write(self, number: int, rows: "DataFrame", expected: int, *, kind: str = "slices") -> SliceSpan:
        """Record these rows of the run's batch ``number``, about ``expected`` of them, in a directory of this name."""
        from pyspark.sql import functions as F  # noqa: N812

        columns, source = self._options.request_columns, self._checked.source.rows
        keyed = columns.add_with_keys(rows)
        slices = number_of_slices(expected, slots_of(self._spark).total)
        row_identity = F.expr(identity(source.schema, self._checked.id_columns or source.columns))
        together = not self._options.compute_each and not self._options.group_by_prefix
        if together:
            frequent = frequent_keys(
                columns.add_with_keys(source), rows_in=self._checked.rows_in, slices=slices
            )
            row_identity = group_of(keyed, row_identity, frequent)
        return write_slices(
            keyed,
            self._work.rows_path(number, kind),
            identity=row_identity,
            slices=slices,
            slots=other_slots(self._spark),
            by_prefix=self._options.group_by_prefix,
            order=order_of(self._spark, self._options.order_by),
            equal_together=together,
            max_tokens=self._options.generation.max_tokens,
        )

    def read(self, spans: Sequence[SliceSpan]) -> SlicedRows:
        """Return the rows of at least one slice."""
        schema = self._checked.source.rows.schema
        return SlicedRows(self._spark, spans, schema, by_prefix=self._options.group_by_prefix)
