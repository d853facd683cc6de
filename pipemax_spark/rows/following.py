"""Follow a table whose changes can be read: what was added, changed and deleted since the last run, as one batch.

A row counts as it is after its last change, whatever came before: a row that was deleted and inserted again is there.
Where the changes since the position cannot be read any more, and in the first run, all rows are compared instead, in
the same way: a row is left if the output lacks it or has it with another request (``Batch.finds_changed``). The changes
are written down once, because several questions are asked of them and the table may forget them meanwhile.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, Self

from pipemax_spark.errors import JobError, cause_of
from pipemax_spark.rows.annotated import holds_annotations
from pipemax_spark.rows.incremental import Batch, VersionRange
from pipemax_spark.rows.position import RESCAN, Position, Positions
from pipemax_spark.spark.helper_columns import free_name
from pipemax_spark.spark.sql import quoted
from pipemax_spark.storage.hadoop import LITERAL_PATH
from pipemax_spark.storage.output_table import OutputTable

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_IS_THERE, _ORDER, _RANK = "__pipemax_is_there", "__pipemax_order", "__pipemax_rank"


@dataclass(frozen=True, slots=True)
class RawChanges:
    """Rows of a table before or after a change."""

    rows: "DataFrame"
    """With the columns of the table, and the two that follow."""
    order: str
    """SQL by which later changes are greater."""
    is_there: str
    """SQL that is true for a row as the change left it, and false for one that the change took away."""
    only_added: bool
    """Whether it is certain that no row was changed or deleted."""


class ChangingInput(Protocol):
    """An input at one version, and the changes that have led to it."""

    @property
    def version(self) -> int:
        """The version up to which the run reads."""
        ...

    def mark(self) -> str | None:
        """Return a text that distinguishes the version from any other; None if it has none."""
        ...

    def whole(self) -> "DataFrame":
        """Return all rows of the version."""
        ...

    def check_same(self, position: Position) -> None:
        """Raise ``JobError`` if the table is not the one in which the position was noted."""
        ...

    def changes(self, since: int) -> RawChanges:
        """Return the changes after version ``since``."""
        ...

    def is_unreadable(self, error: Exception) -> bool:
        """Tell whether the error means that the changes, or some of them, cannot be read."""
        ...


class FollowedChanges:
    """The rows that were added, changed or deleted since the last run: enter it with ``with`` and iterate, once."""

    def __init__(
        self,
        table: ChangingInput,
        output: OutputTable,
        positions: Positions,
        *,
        rows: "DataFrame",
        id_columns: Sequence[str],
        directory: str,
        need: str | None = None,
        rescans: bool = False,
        skips_changes: bool = False,
        tells_gone: bool = False,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Prepare to read ``table``, whose rows under ``--where`` are ``rows``, and to write to ``directory``.

        ``need`` is what the job lacks to follow changes; then only added rows are read, and others are refused or
        skipped. With ``tells_gone``, batches tell for certain which rows the input has and has no more. ``say`` is told
        if changes cannot be read, or are skipped.
        """
        self._need = need
        self._skips_changes = skips_changes
        self._table = table
        self._output = output
        self._positions = positions
        self._rows = rows
        self._names = list(id_columns)
        self._ids = [*map(quoted, id_columns)]
        self._directory = directory
        self._rescans = rescans
        self._tells_gone = tells_gone
        self._say = say

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def __iter__(self) -> Iterator[Batch]:
        table = self._table
        position = None if self._rescans else self._positions.read()
        if position is None:
            yield self._everything()
        else:
            table.check_same(position)
            if position.version != table.version:
                yield from self._changed(position)
        self._positions.write(table.version, table.mark())

    def _everything(self) -> Batch:
        """Return all rows, to be compared with the output."""
        gone, there = None, None
        if self._tells_gone:
            there = self._table.whole().select(*self._ids)
            held = self._output.read()
            if holds_annotations(held.schema):
                gone = held.select(*self._ids).distinct().join(there, self._names, "left_anti")
        return Batch(
            rows=self._rows,
            compares_all=True,
            counts_all=True,
            finds_changed=self._need is None,
            kept_ids=there,
            gone_ids=gone,
        )

    def _changed(self, position: Position) -> Iterator[Batch]:
        """Yield the rows that were changed since the position, or all rows if that cannot be read."""
        table = self._table
        part = VersionRange(since=position.version, until=table.version)
        try:
            raw = table.changes(position.version)
            if self._need is None:
                rows, gone = self._last_changes(raw)
        except Exception as error:
            if not table.is_unreadable(error):
                raise
            self._say(
                f"the changes of the input since version {position.version} cannot be read, so all of its rows are "
                f"compared with the output ({cause_of(error)})"
            )
            yield self._everything()
            return
        whole = table.whole()
        if self._need is not None:
            yield from self._added(raw, part, whole)
            return
        if self._tells_gone:  # of two rows with one id, one may have been deleted
            gone = gone.join(whole.select(*self._ids), self._names, "left_anti")
        yield Batch(
            rows=rows,
            part=part,
            whole=whole,
            finds_changed=True,
            kept_ids=rows.select(*self._ids),
            gone_ids=gone,
        )

    def _added(self, raw: RawChanges, part: VersionRange, whole: "DataFrame") -> Iterator[Batch]:
        """Yield the rows that were added, and all rows where a change that is skipped may have added some."""
        if not raw.only_added and not self._skips_changes:
            raise JobError(
                "rows of the input were updated or deleted since the last run, but --incremental follows only appends "
                f"here. To have changed rows annotated again needs {self._need}. Give --skip-changes to skip those "
                f"commits. {RESCAN.replace('Give', 'Or give', 1)}"
            )
        yield Batch(rows=raw.rows.select(*map(quoted, self._rows.columns)), part=part, whole=whole)
        if not raw.only_added:
            self._say(
                "--skip-changes skips changed rows of the input, but rows that were added are annotated"
            )
            yield Batch(rows=self._rows, compares_all=True)

    def _last_changes(self, raw: RawChanges) -> "tuple[DataFrame, DataFrame]":
        """Write each id's last change down; return the rows that are there after it, and the ids of the others."""
        from pyspark.sql import Window
        from pyspark.sql import functions as F  # noqa: N812

        columns = self._rows.columns
        is_there, order, rank = (free_name(name, raw.rows.columns) for name in (_IS_THERE, _ORDER, _RANK))
        rows = raw.rows.withColumns({is_there: F.expr(raw.is_there), order: F.expr(raw.order)})
        # A change of an id, and an overwrite, take a row away and bring one in the same commit.
        latest = Window.partitionBy(*self._ids).orderBy(F.col(order).desc(), F.col(is_there).desc())
        last = rows.withColumn(rank, F.rank().over(latest)).where(f"{rank} = 1")
        last = last.select(*map(quoted, columns), is_there)
        last.write.mode("overwrite").parquet(self._directory)
        session = last.sparkSession
        kept = session.read.schema(last.schema).options(**LITERAL_PATH).parquet(self._directory)
        there = kept.where(is_there).select(*map(quoted, columns))
        return there, kept.where(f"NOT {is_there}").select(*self._ids).distinct()
