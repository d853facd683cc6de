"""Sample a table without reading all of it, from the first rows of some splits, drawn at random.

A split is what one of Spark's tasks reads: a part of a file, one file, or several small ones. Spark runs tasks only for
the splits that are drawn, so the cost does not grow with the table, whatever its format; a drawn split may be read to
its end. A sample is biased if a table's order has a meaning: it has no rows from splits that were not drawn, nor any
but the first rows of a split.

A view that shuffles, for instance one that joins tables, has no splits of its own. Its first rows are taken, at the
cost of the view's shuffles.
"""

import json
import math
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from pipemax.wire import ErrorCode, python_values, reason
from pipemax_spark.executor.requests import piece_requests
from pipemax_spark.request.columns import RequestColumns, without_input_columns
from pipemax_spark.spark.session import is_connect

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, Row

_SAMPLED_ROWS = 1_000
_LOOKED_AT_ROWS = 100_000
_MIN_SPLITS, _MAX_SPLITS = 16, 64
_MAX_DRAWS = 4
"""Maximum number of draws while the drawn splits have no row, for instance because a condition selects rows of few
files."""
_REQUEST = "request"


def sample_requests(rows: "DataFrame", columns: RequestColumns, rows_in: int) -> list[dict[str, Any]]:
    """Return the requests of up to 1,000 rows as the preflight takes them. ``rows_in`` is the number of ``rows``.

    Tasks make them as they do for an engine. If the drawn splits have no rows, because a condition selects rows of few
    files, take the first ones, wherever they are.
    """
    requests = without_input_columns(columns.add(rows))
    as_json = _AsJson(len(columns.questions))

    def texts_of(some: "DataFrame") -> "DataFrame":
        return some.mapInArrow(as_json, f"{_REQUEST} string")

    texts: list[Row] = []
    if rows_in > _SAMPLED_ROWS:
        some = SomeRows.of(requests, rows_in=rows_in, looked_at_rows=_LOOKED_AT_ROWS)
        texts = some.collect(texts_of(some.sampled(_SAMPLED_ROWS)), _SAMPLED_ROWS)
    texts = texts or texts_of(requests.limit(_SAMPLED_ROWS)).collect()
    return [request for row in texts for request in json.loads(row[0])]


@dataclass(frozen=True, slots=True)
class _AsJson:
    """The function of ``mapInArrow``: turn each row into its requests, as JSON text."""

    questions: int

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            requests = piece_requests(batch, 0, questions=self.questions)
            columns = [python_values(requests.column(name)) for name in requests.schema.names]
            read = [
                _readable(dict(zip(requests.schema.names, values, strict=True)))
                for values in zip(*columns, strict=True)
            ]
            per_row = max(1, self.questions)
            texts = [json.dumps(read[start : start + per_row]) for start in range(0, len(read), per_row)]
            yield pa.RecordBatch.from_pydict({_REQUEST: pa.array(texts, pa.string())})


def _readable(request: dict[str, Any]) -> dict[str, Any]:
    """Return a request as JSON takes it: without its id, and with names in place of images, which may be large."""
    del request["row_id"]
    for value in request.values():
        if isinstance(value, Exception):
            return {"fault": {"code": ErrorCode.INVALID_PROMPT.value, "message": reason(value)}}
    images = [*(request["images"] or ())]
    images += [
        part["image"]
        for turn in request["messages"] or ()
        for part in (turn or {}).get("parts") or ()
        if part
    ]
    for image in images:
        if image is not None and (image["content"] is not None or image["source"] is not None):
            image |= {"content": None, "source": "image"}
    return request


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
    def of(cls, rows: "DataFrame", *, rows_in: int, looked_at_rows: int) -> "SomeRows":
        """Choose splits with about ``looked_at_rows`` rows out of ``rows``, which has ``rows_in`` rows."""
        if _shuffles(rows):
            return cls(rows=rows.limit(looked_at_rows), expected_rows=min(rows_in, looked_at_rows), _draws=())
        num_splits = rows.rdd.getNumPartitions()
        rows_per_split = max(1.0, rows_in / max(1, num_splits))
        wanted = min(_MAX_SPLITS, max(_MIN_SPLITS, math.ceil(looked_at_rows / rows_per_split)), num_splits)
        order = random.Random(0).sample(range(num_splits), min(num_splits, _MAX_DRAWS * wanted))
        draws = [tuple(sorted(order[start : start + wanted])) for start in range(0, len(order), wanted)]
        if rows_in > looked_at_rows:
            max_rows = math.ceil(looked_at_rows / wanted)
            rows = rows.mapInArrow(_FirstRows(max_rows), rows.schema)
            rows_per_split = min(rows_per_split, max_rows)
        return cls(rows=rows, expected_rows=math.ceil(wanted * rows_per_split), _draws=tuple(draws))

    def sampled(self, limit: int) -> "DataFrame":
        """Return some of these rows, drawn at random and by half more than ``limit``, for ``collect``."""
        return self.rows.sample(fraction=min(1.0, 1.5 * limit / self.expected_rows), seed=0)

    def collect(self, chosen: "DataFrame", limit: int) -> list["Row"]:
        """Return up to ``limit`` rows of ``chosen``, which was made from ``self.rows``, in the order of the table."""
        if not self._draws:
            return chosen.limit(limit).collect()
        for splits in self._draws:
            first = partial(_first, count=math.ceil(limit / len(splits)))
            first_rows = chosen.sparkSession.sparkContext.runJob(chosen.rdd, first, splits)
            if first_rows:
                return first_rows[:limit]
        return []


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


def _first(rows: "Iterable[Row]", count: int) -> "list[Row]":
    return list(islice(rows, count))


def _shuffles(rows: "DataFrame") -> bool:
    """Tell whether reading one partition of the rows takes other partitions' rows, or none can be chosen."""
    return is_connect(rows.sparkSession) or "Exchange" in rows._jdf.queryExecution().executedPlan().toString()
