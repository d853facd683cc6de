"""Sample a table without reading all of it, from the first rows of some splits, drawn at random.

A split is what one of Spark's tasks reads: a part of a file, one file, or several small ones. Spark runs tasks only for
the splits that are drawn, so the cost does not grow with the table, whatever its format; a drawn split may be read to
its end. A sample is biased if a table's order has a meaning: it has no rows from splits that were not drawn, nor any
but the first rows of a split.

A view that shuffles, for instance one that joins tables, has no splits of its own. Its first rows are taken, at the
cost of the view's shuffles.
"""

import math
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

import pyarrow as pa

from pipemax_spark.request_columns import RequestColumns, prompt_text

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, Row

_PROMPTS = 1_000
_LOOKED_AT_FOR_PROMPTS = 100_000
_MIN_SPLITS, _MAX_SPLITS = 16, 64
_MAX_DRAWS = 4
"""Maximum number of draws while the drawn splits have no row, for instance because a condition selects rows of few
files."""
_TEXT = "__pipemax_text"


def sample_prompts(rows: "DataFrame", columns: RequestColumns, rows_in: int) -> list[str | None]:
    """Return up to 1,000 prompts; a conversation becomes its text. ``rows_in`` is the number of ``rows``.

    If the drawn splits have none, because a condition selects rows of few files, return the first ones, wherever they
    are.
    """
    requests = columns.add(rows)
    texts = requests.select(prompt_text(requests).alias(_TEXT))
    if rows_in <= _PROMPTS:
        return [row[0] for row in texts.limit(_PROMPTS).collect()]
    some = SomeRows.of(texts, rows_in=rows_in, looked_at_rows=_LOOKED_AT_FOR_PROMPTS)
    fraction = min(1.0, 1.5 * _PROMPTS / some.expected_rows)
    found = some.collect(some.rows.sample(fraction=fraction, seed=0), _PROMPTS)
    return [row[0] for row in found or texts.limit(_PROMPTS).collect()]


@dataclass(frozen=True, slots=True, kw_only=True)
class SomeRows:
    """Some rows of a DataFrame; only a bounded number is ever read."""

    rows: "DataFrame"
    """To be narrowed further, without a shuffle, and then given to ``collect``."""
    expected_rows: int
    """About how many rows are read."""
    _draws: tuple[tuple[int, ...], ...]
    """Splits, in ascending order; none if the rows have to be read in order."""

    @classmethod
    def of(cls, rows: "DataFrame", *, rows_in: int, looked_at_rows: int, seed: int = 0) -> "SomeRows":
        """Choose splits with about ``looked_at_rows`` rows out of ``rows``, which has ``rows_in`` rows."""
        if _shuffles(rows):
            return cls(rows=rows.limit(looked_at_rows), expected_rows=min(rows_in, looked_at_rows), _draws=())
        num_splits = rows.rdd.getNumPartitions()
        rows_per_split = max(1.0, rows_in / max(1, num_splits))
        wanted = min(_MAX_SPLITS, max(_MIN_SPLITS, math.ceil(looked_at_rows / rows_per_split)), num_splits)
        order = random.Random(seed).sample(range(num_splits), min(num_splits, _MAX_DRAWS * wanted))
        draws = [tuple(sorted(order[start : start + wanted])) for start in range(0, len(order), wanted)]
        if rows_in > looked_at_rows:
            max_rows = math.ceil(looked_at_rows / wanted)
            rows = rows.mapInArrow(_FirstRows(max_rows), rows.schema)
            rows_per_split = min(rows_per_split, max_rows)
        return cls(rows=rows, expected_rows=math.ceil(wanted * rows_per_split), _draws=tuple(draws))

    def collect(self, chosen: "DataFrame", limit: int) -> list["Row"]:
        """Return up to ``limit`` rows of ``chosen``, which was made from ``self.rows``, in the order of the table."""
        if not self._draws:
            return chosen.limit(limit).collect()
        for splits in self._draws:
            first = _First(math.ceil(limit / len(splits)))
            found = chosen.sparkSession.sparkContext.runJob(chosen.rdd, first, splits)
            if found:
                return found[:limit]
        return []


@dataclass(frozen=True, slots=True)
class _First:
    """The function of ``runJob``."""

    count: int

    def __call__(self, rows: "Iterable[Row]") -> list["Row"]:
        return list(islice(rows, self.count))


@dataclass(frozen=True, slots=True)
class _FirstRows:
    """The function of ``mapInArrow``: pass the first rows of a split on, and read no more."""

    max_rows: int

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        left = self.max_rows
        for batch in batches:
            yield batch.slice(0, left)
            left -= batch.num_rows
            if left <= 0:
                return


def _shuffles(rows: "DataFrame") -> bool:
    """Tell whether reading one partition of the rows takes other partitions' rows."""
    return "Exchange" in rows._jdf.queryExecution().executedPlan().toString()
