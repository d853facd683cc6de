"""Cut rows into slices that are fixed before anything runs, and join slices into chunks as the rate becomes known.

The rows that are left are written once, as Parquet, in slices. A chunk is a run of consecutive slices; its number never
names other rows. A row's slice depends only on the row's values, never on its place: when an executor is lost while
slices are written, Spark recomputes its part of the shuffle, possibly in another order, and each row must go to the
same slice again (``arranging``). There are three orders:

- dealt: a hash decides a row's slice, so slices are alike. Within a slice the rows are sorted by prompt length and
  distributed one by one, so every partition of a chunk gets short and long rows in proportion. Rows with equal
  requests may be kept together (``equal_rows``), so that one engine computes them once;
- by prefix: all rows are sorted by their prompt, slices are cut from end to end, and so are a chunk's partitions,
  so that prompts with the same beginning reach the engine one after the other;
- by importance (``--order-by``): a slice holds a range of the order's values, the first rows in slice 0. Within a slice
  rows are dealt as above, so chunks are the unit of the order.

A row's place within its slice is stored with the row. It is a hint for spreading rows evenly, and may be any number.

The table's last chunk may be in another order, so that rows which are expected to be long do not begin last: its
partitions begin one after the other, the first ones with the longest rows, and each has its longest first. Rows that
say their own ``max_tokens`` are sorted by it, and by the length of their prompt within that.
"""

import itertools
import threading
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import reduce
from typing import TYPE_CHECKING

from pipemax_spark.executor.requests import KEY_COLUMN
from pipemax_spark.request.columns import without_request_columns
from pipemax_spark.rows.arranging import HASH, HELPERS, LENGTH, RANK, SLICE, WRITER, arranged, nth
from pipemax_spark.rows.equal_rows import shared_rank
from pipemax_spark.rows.order_by import OrderKey
from pipemax_spark.rows.partition_keys import partition_keys
from pipemax_spark.spark.helper_columns import free_name, name_in
from pipemax_spark.spark.sql import quoted
from pipemax_spark.storage.hadoop import LITERAL_PATH

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession
    from pyspark.sql.types import StructType

_MAX_SLICES = 4_096
_MIN_SLICE_ROWS_PER_SLOT = 64
_MIN_FIRST_ROWS_PER_SLOT = 256
_GUESSED_ROWS_PER_S_AND_SLOT = 1.0
"""The assumed rate for the first chunk, before any engine has shown its rate."""
_GROWTH = 4
"""A chunk has at most this many times the rows of the chunk before it, because the first rates are rough."""
_TELLING_CORRELATION = 0.2
"""Of prompt and answer lengths, from which on prompts say which answers are long. In simulations without any
correlation, the order by prompts cost up to 3% of a run."""


class RowOrder(StrEnum):
    """The order in which a chunk's rows go to the engines."""

    AS_DEALT = "as dealt"
    LAST_RANK_FIRST = "last rank first"  # rows with large max_tokens, or with long prompts
    FIRST_RANK_FIRST = "first rank first"


def order_of_last_chunk(*, has_own_max_tokens: bool, length_correlation: float | None) -> RowOrder:
    """Return the order in which rows that are expected to be long go first, as far as anything tells which are."""
    if has_own_max_tokens:
        return RowOrder.LAST_RANK_FIRST
    if length_correlation is None or abs(length_correlation) < _TELLING_CORRELATION:
        return RowOrder.AS_DEALT
    return RowOrder.LAST_RANK_FIRST if length_correlation > 0 else RowOrder.FIRST_RANK_FIRST


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """The rows of slices [first_slice, end_slice)."""

    number: int
    first_slice: int
    end_slice: int
    rows: int
    """The exact number of rows."""

    @property
    def slices_note(self) -> str:
        """The slices, as written in the note of the chunk's commit."""
        return f" (slices {self.first_slice} to {self.end_slice - 1})"


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceSpan:
    """The slices [first, end) of a directory that ``write_slices`` wrote."""

    path: str
    first: int
    end: int


def pick_slices(spans: Sequence[SliceSpan], numbers: Iterable[int]) -> list[SliceSpan]:
    """Return those of the spans' slices that have these numbers, counted from 0 over all spans, in ascending order."""
    places = [(span.path, number) for span in spans for number in range(span.first, span.end)]
    picked: list[SliceSpan] = []
    for path, place in (places[number] for number in sorted(numbers)):
        last = picked[-1] if picked else None
        if last is not None and (last.path, last.end) == (path, place):
            picked[-1] = replace(last, end=place + 1)
        else:
            picked.append(SliceSpan(path=path, first=place, end=place + 1))
    return picked


def number_of_slices(rows: int, slots: int) -> int:
    """Return the number of slices: a slice is small compared with the first chunk, and there are not too many files.

    Where there are more slices than slots, every slot writes equally many.
    """
    slices = max(1, min(_MAX_SLICES, rows // (_MIN_SLICE_ROWS_PER_SLOT * slots)))
    return slices - slices % slots if slices > slots else slices


def write_slices(
    requests: "DataFrame",
    path: str,
    *,
    identity: "Column",
    slices: int,
    slots: int,
    by_prefix: bool = False,
    order: Sequence[OrderKey] = (),
    equal_together: bool = False,
    max_tokens: int = 2**31 - 1,
) -> SliceSpan:
    """Write rows with their keys (``RequestColumns.add_with_keys``), in slices, and return all of these.

    Their prompts decide the order and are not written. ``identity`` is a column that distinguishes rows, for instance
    by their ids; rows with the same identity, and equal in ``order``, are in one slice. With ``equal_together``, rows
    of a slice with the same identity also get the same rank, but for large groups. ``max_tokens`` is that of rows that
    do not say their own.
    """
    rows = arranged(
        requests,
        identity,
        slices=slices,
        slots=slots,
        by_prefix=by_prefix,
        order=order,
        max_tokens=max_tokens,
    )

    def named(helper: str) -> str:
        return name_in(helper, requests.columns)

    if equal_together and not by_prefix:
        partition, within = [[*map(named, some)] for some in ((SLICE, WRITER), (LENGTH, HASH))]
        rows = rows.withColumn(named(RANK), shared_rank(partition, within, place=named(RANK)))
    without = without_request_columns(rows).drop(*map(named, HELPERS))
    without.write.partitionBy(named(SLICE)).parquet(path)
    return SliceSpan(path=path, first=0, end=slices)


class SlicedRows:
    """The rows of recorded slices, read chunk by chunk."""

    def __init__(
        self,
        spark: "SparkSession",
        spans: Sequence[SliceSpan],
        schema: "StructType",
        *,
        by_prefix: bool = False,
    ) -> None:
        """Prepare to read these slices, at least one, numbered from 0 over all spans.

        ``schema`` is that of the rows without their keys.
        """
        from pyspark.sql import functions as F  # noqa: N812
        from pyspark.sql.types import IntegerType, LongType, StringType, StructType

        # The file index is built here, once; the schema is given, because files do not keep which columns may be null.
        helpers = [free_name(helper, schema.names) for helper in (KEY_COLUMN, RANK, SLICE)]
        self._key, self._rank, self._slice = helpers
        fields = StructType([*schema.fields]).add(self._key, StringType())
        fields = fields.add(self._rank, LongType()).add(self._slice, IntegerType())
        files = {
            path: spark.read.schema(fields).options(**LITERAL_PATH).parquet(path)
            for path in {span.path for span in spans}
        }
        parts, num_slices = [], 0
        for span in spans:
            rows = files[span.path].where(f"{self._slice} >= {span.first} AND {self._slice} < {span.end}")
            if span.first != num_slices:
                rows = rows.withColumn(self._slice, rows[self._slice] + (num_slices - span.first))
            parts.append(rows)
            num_slices += span.end - span.first
        self._all = reduce(lambda some, more: some.unionAll(more), parts)
        self.schema = schema
        by_slice = (
            self._all.groupBy(self._slice).agg(*(f(self._rank) for f in (F.count, F.min, F.max))).collect()
        )
        counts = {number: count for number, count, *_ in by_slice}
        ranks = {number: (first, last) for number, _, first, last in by_slice}
        self._ranks = [ranks.get(number, (0, 0)) for number in range(num_slices)]
        self.spans = tuple(spans)
        self.slice_rows: tuple[int, ...] = tuple(counts.get(number, 0) for number in range(num_slices))
        """Rows of each slice."""
        self.rows = sum(self.slice_rows)
        self._by_prefix = by_prefix

    def read_all(self) -> "DataFrame":
        """Return the rows of all slices, with their keys."""
        return self._all.select(*self._columns)

    def read_input(self) -> "DataFrame":
        """Return the rows of all slices as they were in the input."""
        return self._all.select(*map(quoted, self.schema.names))

    def read(
        self,
        chunk: Chunk,
        *,
        partitions: int,
        order: RowOrder = RowOrder.AS_DEALT,
        executors: int = 1,
    ) -> "DataFrame":
        """Return a chunk's rows with their keys, spread evenly over exactly ``partitions`` partitions.

        In an order other than as dealt, the first partitions, one for each of ``executors``, have the first rows, and
        so on. Rows that are sorted by prefix stay so. Spark does not merge the partitions again, and each time the
        same rows are in the same partition.
        """
        is_dealt = self._by_prefix or order is RowOrder.AS_DEALT
        place = None if is_dealt else self._place(chunk, order)
        target = self._target(chunk, partitions)
        if place is not None:
            target = _in_turn(place, self._all[self._rank], partitions, executors)
        target = nth(partition_keys(partitions), target.cast("int"))
        number = self._all[self._slice]
        chosen = self._all.where((number >= chunk.first_slice) & (number < chunk.end_slice))
        spread = chosen.repartition(partitions, target)
        if self._by_prefix:
            spread = spread.sortWithinPartitions(self._slice, self._rank)
        elif place is not None:
            spread = spread.sortWithinPartitions(place)
        return spread.select(*self._columns)

    @property
    def _columns(self) -> list[str]:
        return [*map(quoted, self.schema.names), self._key]

    def _target(self, chunk: Chunk, partitions: int) -> "Column":
        """Return a column with the number of the partition that a row goes to."""
        from pyspark.sql import functions as F  # noqa: N812

        if not self._by_prefix:
            return F.col(self._rank) % partitions
        rows = self.slice_rows[chunk.first_slice : chunk.end_slice]
        before = F.array(*(F.lit(count) for count in itertools.accumulate(rows[:-1], initial=0)))
        place = F.element_at(before, F.col(self._slice) - chunk.first_slice + 1) + F.col(self._rank)
        return F.floor(place * partitions / max(1, chunk.rows))

    def _place(self, chunk: Chunk, order: RowOrder) -> "Column":
        """Return a column with a row's place in its slice, from 0 to 1. Slices are alike: it is that in the chunk."""
        from pyspark.sql import functions as F  # noqa: N812

        ranks = self._ranks[chunk.first_slice : chunk.end_slice]
        number = F.col(self._slice) - chunk.first_slice
        rank = F.col(self._rank) - nth([first for first, _ in ranks], number)
        # In the middle of its share, so that slices of other sizes mix.
        place = (rank + 0.5) / nth([last - first + 1 for first, last in ranks], number)
        return 1 - place if order is RowOrder.LAST_RANK_FIRST else place


def _in_turn(place: "Column", rank: "Column", partitions: int, executors: int) -> "Column":
    """Return a column with the partition of a row at ``place``: groups of a partition for each executor, in order."""
    from pyspark.sql import functions as F  # noqa: N812

    groups = max(1, partitions // executors)
    group = F.least(F.floor(place * groups), F.lit(groups - 1))
    # The last group has what does not divide; a row's rank deals a group's rows to its partitions.
    size = F.when(group == groups - 1, partitions - (groups - 1) * (partitions // groups)).otherwise(
        partitions // groups
    )
    return group * (partitions // groups) + rank % size


class ChunkPlan:
    """Hands out chunks, each slice once. Thread-safe."""

    def __init__(
        self, *, slice_rows: Sequence[int], slots: int, commit_every_s: float, first_number: int = 0
    ) -> None:
        """Plan chunks of slices that have ``slice_rows`` rows.

        ``first_number`` continues after the run's chunks of other rows, because a number stands for one chunk of a run.
        """
        self._ends = list(itertools.accumulate(slice_rows))
        """For each slice, the rows up to its end."""
        self._commit_every_s = commit_every_s
        self.first_number = first_number
        guessed_rows = _GUESSED_ROWS_PER_S_AND_SLOT * commit_every_s
        self._first_rows = slots * max(_MIN_FIRST_ROWS_PER_SLOT, guessed_rows)
        self._lock = threading.Lock()
        self._chunks: list[Chunk] = []

    @property
    def chunks(self) -> Sequence[Chunk]:
        with self._lock:
            return list(self._chunks)

    @property
    def rows(self) -> int:
        """The rows of all slices together."""
        return self._ends[-1]

    @property
    def is_used_up(self) -> bool:
        """Whether all rows are handed out."""
        with self._lock:
            return sum(chunk.rows for chunk in self._chunks) == self.rows

    def next(
        self, rows_per_s: float | None, *, at_least: int = 0, at_most: int | None = None
    ) -> Chunk | None:
        """Hand out the next chunk; None when all slices are handed out, or if the next has more than ``at_most`` rows.

        The chunk has about the rows of one commit period at this rate, and at least ``at_least`` rows, which keep the
        engines fed. Of ``at_most`` rows, as many as will be done before a limit, it has half, or one slice: if they
        take longer than expected, the chunks after it become smaller.
        """
        with self._lock:
            first = self._chunks[-1].end_slice if self._chunks else 0
            before = self._ends[first - 1] if first else 0
            left = self.rows - before
            if not left:
                return None
            wanted = max(1, at_least, self._rows_wanted(rows_per_s))
            end = self._end_of(before, wanted, at_least)
            rows = self._ends[end - 1] - before
            # A last chunk of a few rows is not worth a commit, nor may it be too small to keep the engines fed.
            if left < rows * 5 / 4 or left - rows < at_least:
                end, rows = len(self._ends), left
            if at_most is not None and rows > at_most / 2:
                one_slice = bisect_right(self._ends, before) + 1
                end = max(one_slice, bisect_right(self._ends, before + at_most / 2))
                rows = self._ends[end - 1] - before
                if rows > at_most:
                    return None
            chunk = Chunk(
                number=self.first_number + len(self._chunks), first_slice=first, end_slice=end, rows=rows
            )
            self._chunks.append(chunk)
            return chunk

    def _end_of(self, before: int, wanted: float, at_least: int) -> int:
        """Return the slice end nearest to ``wanted`` rows after the first ``before``, at ``at_least`` rows or more."""
        above = bisect_left(self._ends, before + wanted)
        if above == len(self._ends):
            return above
        rows_below = (self._ends[above - 1] if above else 0) - before
        rows_above = self._ends[above] - before
        is_enough = rows_below >= max(1, at_least)
        return above if is_enough and wanted - rows_below < rows_above - wanted else above + 1

    def _rows_wanted(self, rows_per_s: float | None) -> float:
        if rows_per_s is None:
            return self._chunks[-1].rows if self._chunks else self._first_rows
        wanted = rows_per_s * self._commit_every_s
        return min(wanted, _GROWTH * self._chunks[-1].rows) if self._chunks else wanted
