"""Arrange rows before they are written: give each its slice, and its place in what one task writes.

A row's slice depends on its values only. Where slices are ranges, Spark samples the rows for the ranges' bounds in a
job of its own and keeps the bounds with the shuffle, so a part that is computed again has the same ones. A hash of the
row's identity is the last sort key, so a range can end between rows with equal values.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pipemax_spark.executor.requests import OVERRIDES_COLUMN
from pipemax_spark.request.columns import prompt_text
from pipemax_spark.rows.order_by import OrderKey
from pipemax_spark.rows.partition_keys import partition_keys
from pipemax_spark.spark.helper_columns import name_in

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

SLICE, RANK = "__pipemax_slice", "__pipemax_rank"
LENGTH, HASH, WRITER = "__pipemax_length", "__pipemax_hash", "__pipemax_writer"
_TEXT = "__pipemax_text"
HELPERS = (HASH, _TEXT, LENGTH, WRITER)
"""Columns that are of no use once the rows are written."""
_ORDER = "__pipemax_order"
_WRITERS_PER_SLOT = 4
_INDEX_BITS = 33
"""``monotonically_increasing_id`` holds the row's place in its partition in this many bits."""


def arranged(
    requests: "DataFrame",
    identity: "Column",
    *,
    slices: int,
    slots: int,
    by_prefix: bool,
    order: Sequence[OrderKey],
    max_tokens: int,
) -> "DataFrame":
    """Return the rows with their slices and their places in their writers' partitions; see ``chunks.write_slices``."""
    from pyspark.sql import functions as F  # noqa: N812

    text = prompt_text(requests)
    writers = min(slices, _WRITERS_PER_SLOT * slots)
    names = (name_in(helper, requests.columns) for helper in (HASH, _TEXT, SLICE, RANK, LENGTH, WRITER))
    hashes, texts, number, rank, length, writer = names
    hashed = requests.withColumn(hashes, F.xxhash64(identity))
    if by_prefix:
        rows = (
            hashed.withColumn(texts, F.coalesce(text, F.lit("")))
            .repartitionByRange(slices, texts, hashes)
            .sortWithinPartitions(texts, hashes)
            .withColumn(number, F.spark_partition_id())
        )
    else:
        sized = hashed.withColumn(length, _expected_length(requests, text, max_tokens))
        if order:
            numbered = _in_ranges(sized, order, hashes, slices).withColumn(number, F.spark_partition_id())
        else:
            numbered = sized.withColumn(number, F.pmod(hashes, F.lit(slices)).cast("int"))
        rows = (
            numbered.withColumn(writer, nth(partition_keys(writers), F.col(number) % writers))
            .repartition(writers, writer)
            .sortWithinPartitions(number, writer, length, hashes)
        )
    return rows.withColumn(rank, _place_in_partition())


def _in_ranges(rows: "DataFrame", order: Sequence[OrderKey], hashes: str, slices: int) -> "DataFrame":
    """Return the rows in ``slices`` partitions, each with a range of the order's values, the first rows first."""
    from pyspark.sql import functions as F  # noqa: N812

    names = [name_in(f"{_ORDER}_{place}", rows.columns) for place in range(len(order))]
    with_values = rows.withColumns(dict(zip(names, (key.value for key in order), strict=True)))
    sorting = [key.sorting(F.col(name)) for key, name in zip(order, names, strict=True)]
    return with_values.repartitionByRange(slices, *sorting, F.col(hashes)).drop(*names)


def _expected_length(requests: "DataFrame", text: "Column", max_tokens: int) -> "Column":
    """Return a column by which rows are sorted, the longest last."""
    from pyspark.sql import functions as F  # noqa: N812

    length = F.coalesce(F.length(text), F.lit(0))
    overrides = name_in(OVERRIDES_COLUMN, requests.columns)
    if overrides not in requests.columns:
        return length
    kind: Any = requests.schema[overrides].dataType
    if "max_tokens" not in getattr(kind, "names", ()):  # NULL has no fields
        return length
    # Of any type that users have it in; a value that is none is its row's error.
    own_max_tokens = requests[overrides]["max_tokens"].try_cast("double")
    return F.struct(F.coalesce(own_max_tokens, F.lit(max_tokens)).alias("max_tokens"), length.alias("length"))


def _place_in_partition() -> "Column":
    from pyspark.sql import functions as F  # noqa: N812

    return F.monotonically_increasing_id().bitwiseAND((1 << _INDEX_BITS) - 1)


def nth(values: Sequence[int], place: "Column") -> "Column":
    """Return a column with the value at ``place``, counted from 0."""
    from pyspark.sql import functions as F  # noqa: N812

    return F.element_at(F.array(*map(F.lit, values)), place + 1)
