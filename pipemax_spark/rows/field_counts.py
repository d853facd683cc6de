"""Count the combinations of values that a template's columns have, over at most a million rows in one pass.

Tasks hash each column's text to 64 bits, and the driver counts: eight bytes of each row and column come to it. Spark's
``approx_count_distinct`` would need a shuffle, and so no split could be left out.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, chain, combinations
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc

from pipemax_spark.request.prompts import as_text, parse_template
from pipemax_spark.rows.prefix import LOOKED_AT_ROWS
from pipemax_spark.rows.prompt_order import MAX_ORDERED_FIELDS, Field, FieldCounts
from pipemax_spark.rows.sample import SomeRows

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.types import StructType

_HASHES, _CHARACTERS = "hashes", "characters"
_MULTIPLIER = 0x9E3779B97F4A7C15 - 2**64
"""Odd, and so keeps all bits: it makes one hash of several, in which their places count."""


def template_fields(template: str, schema: "StructType") -> tuple[str, tuple[Field, ...]]:
    """Return the template's text before its first column, and its columns with the text behind each."""
    texts, names = [""], []
    for part in parse_template(template, schema):
        if part.column is None:
            texts[-1] += part.text
        else:
            names.append(part.column.replace("`", ""))
            texts.append("")
    fields = (Field(name=name, text_behind=text) for name, text in zip(names, texts[1:], strict=True))
    return texts[0], tuple(fields)


def count_fields(
    rows: "DataFrame", template: str, zone: str, *, rows_in: int, reuses: bool
) -> FieldCounts | None:
    """Count combinations of the template's columns; None if no row has a value in all of them.

    ``rows_in`` is the number of rows. With ``reuses``, rows that are equal in all of these columns count once.
    """
    from pyspark.sql import functions as F  # noqa: N812

    named = {
        part.column.replace("`", ""): as_text(part.column, part.kind, zone)
        for part in parse_template(template, rows.schema)
        if part.column is not None and part.kind is not None
    }
    texts, size = [*named.values()], len(named)
    # A null in any column makes the prompt null.
    hashes = [F.when(F.concat(*texts).isNotNull(), F.xxhash64(text)) for text in texts]
    columns = [column.alias(f"_{place}") for place, column in enumerate([*hashes, *map(F.length, texts)])]
    some = SomeRows.of(rows.select(*columns), rows_in=rows_in, looked_at_rows=LOOKED_AT_ROWS)
    packed = some.rows.mapInArrow(_packed, f"{_HASHES} array<binary>, {_CHARACTERS} array<long>")
    batches = some.collect(packed, LOOKED_AT_ROWS)
    values = [_joined([batch[_HASHES][place] for batch in batches]) for place in range(size)]
    num_rows = len(values[0])
    if not num_rows:
        return None
    counted = {
        frozenset(list(named)[place] for place in places): _different([values[place] for place in places])
        for places in _sets(size)
    }
    characters = [sum(batch[_CHARACTERS][place] for batch in batches) / num_rows for place in range(size)]
    return FieldCounts(
        rows=counted[frozenset(named)] if reuses else num_rows,
        combinations=counted,
        characters=dict(zip(named, characters, strict=True)),
    )


def _sets(size: int) -> Iterable[tuple[int, ...]]:
    """Return the sets of places that are counted: all, or where there are too many, those that come first."""
    if size > MAX_ORDERED_FIELDS:
        return accumulate((place,) for place in range(size))
    return chain.from_iterable(combinations(range(size), count) for count in range(1, size + 1))


def _packed(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Do the work of ``mapInArrow``: make one row of a batch, with the hashes of each column, and its characters."""
    for batch in batches:
        rows = batch.filter(batch.column(0).is_valid())
        if rows.num_rows:
            size = rows.num_columns // 2
            hashes = [_bytes_of(column) for column in rows.columns[:size]]
            lengths = [pc.sum(column).as_py() for column in rows.columns[size:]]
            made = [pa.array([hashes], pa.list_(pa.binary())), pa.array([lengths], pa.list_(pa.int64()))]
            yield pa.RecordBatch.from_arrays(made, [_HASHES, _CHARACTERS])


def _bytes_of(column: pa.Array) -> bytes:
    _, values = column.buffers()
    return bytes(memoryview(values)[8 * column.offset :][: 8 * len(column)])


def _joined(parts: Sequence[bytes]) -> pa.Array:
    values = pa.py_buffer(b"".join(parts))
    return pa.Array.from_buffers(pa.int64(), values.size // 8, [None, values])


def _different(columns: Sequence[pa.Array]) -> int:
    """Count the different combinations of the columns' values."""
    together = columns[0]
    for column in columns[1:]:
        # Products and sums wrap around.
        together = pc.add(pc.multiply(together, _MULTIPLIER), column)
    number: int = pc.count_distinct(together).as_py()
    return number
