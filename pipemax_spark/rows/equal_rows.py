"""Keep rows with equal requests together, so that one engine computes them once while it still knows the answer.

An engine server answers a request that it has just answered, or is computing, without computing it again; its memory
of answers is bounded, and each executor has its own. So rows with equal requests go into one slice, one after the
other, and to one task. There are two exceptions. A request that a large share of the rows makes would fill its slice,
and chunks would be unlike: its rows are spread over as many slices as they would fill. Each server soon knows that
answer, and keeps it because it is used all the time. Rows without a prompt cost nothing, and are spread like all rows,
so that they do not fail in a row and look as if all rows did.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from pipemax_spark.executor.requests import KEY_COLUMN
from pipemax_spark.request.columns import prompt_text
from pipemax_spark.rows.sample import SomeRows
from pipemax_spark.spark.helper_columns import name_in

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

_SAMPLED_ROWS = 10_000
_LOOKED_AT_ROWS = 100_000
_MIN_TIMES = 20
"""A request that is less frequent in the sample has less than about half a percent of the rows."""

_MAX_TOGETHER = 256
"""More equal rows than this are distributed over the tasks of a chunk, so that no task has them all."""


def frequent_keys(requests: "DataFrame", *, rows_in: int, slices: int) -> dict[str, int]:
    """Return the keys of requests that many rows make, each with the number of slices that its rows would fill.

    ``requests`` are rows with their keys, ``rows_in`` of them, of which a sample is read.
    """
    if rows_in <= _SAMPLED_ROWS:
        return {}
    keys = requests.select(name_in(KEY_COLUMN, requests.columns))
    some = SomeRows.of(keys, rows_in=rows_in, looked_at_rows=_LOOKED_AT_ROWS)
    sampled = some.collect(some.sampled(_SAMPLED_ROWS), _SAMPLED_ROWS)
    times = Counter(row[0] for row in sampled)
    filled = {
        key: round(slices * count / len(sampled)) for key, count in times.items() if count >= _MIN_TIMES
    }
    return {key: number for key, number in filled.items() if number > 1}


def group_of(requests: "DataFrame", row_identity: "Column", frequent: Mapping[str, int]) -> "Column":
    """Return a column that is equal for rows to keep together: a string that depends only on the row's values.

    ``row_identity`` distinguishes rows; ``frequent`` is the result of ``frequent_keys``.
    """
    from pyspark.sql import functions as F  # noqa: N812

    key = F.col(name_in(KEY_COLUMN, requests.columns))
    group = key
    if frequent:
        known = F.create_map(*(F.lit(value) for pair in frequent.items() for value in pair))
        spread = F.element_at(known, key)  # null for other keys
        part = F.pmod(F.xxhash64(row_identity), spread)
        group = F.when(spread.isNull(), key).otherwise(F.concat(key, F.lit("-"), part.cast("string")))
    text = prompt_text(requests)
    is_empty = text.isNull() | ~text.rlike(r"\S")
    return F.when(is_empty, row_identity).otherwise(group)


def shared_rank(partition: Sequence[str], order: Sequence[str], *, place: str) -> "Column":
    """Return a column with a rank that rows share if they are equal in ``partition`` and ``order``, but for many rows.

    ``place`` is the column with the row's place in its task. In each partition the ranks of distinct rows are
    consecutive, from the first row's place on, so distributing by rank is even. Rows that are shuffled by one of
    ``partition`` and sorted by ``partition`` and ``order`` are neither shuffled nor sorted again.
    """
    from pyspark.sql import Window
    from pyspark.sql import functions as F  # noqa: N812

    window = Window.partitionBy(*partition).orderBy(*order)
    distinct_before = F.dense_rank().over(window) - 1
    copies_before = F.row_number().over(window) - F.rank().over(window)
    rank = F.first(place).over(window) + distinct_before + F.floor(copies_before / _MAX_TOGETHER)
    return rank.cast("long")
