"""Name the columns that this package adds to users' rows while it works on them, by names that no column of theirs has.

A helper is called by its plain name, such as ``__pipemax_key``, unless a column of the rows is called like a helper:
then all helpers get more underscores after ``__pipemax`` than any such column. So the helpers of a frame are those with
the most underscores, whatever else it holds.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

import pyarrow as pa

if TYPE_CHECKING:
    from pyspark.resource import ResourceProfile
    from pyspark.sql import DataFrame
    from pyspark.sql.types import StructType

_STEM = "__pipemax"
_HELPER = re.compile(rf"{_STEM}(_+)", re.IGNORECASE)


def free_name(helper: str, columns: Iterable[str]) -> str:
    """Return the helper's name beside these columns, which are all the user's."""
    return _with_underscores(helper, _most_underscores(columns) + 1)


def name_in(helper: str, columns: Iterable[str]) -> str:
    """Return the helper's name in a frame that has these columns, some of them helpers; it may lack this one."""
    return _with_underscores(helper, max(1, _most_underscores(columns)))


def map_rows(
    rows: "DataFrame",
    task: Callable[[Iterator[pa.RecordBatch]], Iterable[pa.RecordBatch]],
    schema: "StructType",
    *,
    profile: "ResourceProfile | None" = None,
) -> "DataFrame":
    """Return ``mapInArrow`` of rows with helpers: the task sees helpers by their plain names, other columns by none.

    ``mapInArrow`` reads a name with a dot as a path, and refuses a name that two columns have.
    """
    underscores = _most_underscores(rows.columns)
    plain = [
        f"c{place}"
        if match is None or len(match[1]) < underscores
        else f"{_STEM}_{match.string[match.end() :]}"
        for place, match in enumerate(map(_HELPER.match, rows.columns))
    ]
    return rows.toDF(*plain).mapInArrow(task, schema, profile=profile)  # type: ignore[arg-type]


def _with_underscores(helper: str, number: int) -> str:
    return f"{_STEM}{'_' * number}{helper.removeprefix(_STEM).lstrip('_')}"


def _most_underscores(names: Iterable[str]) -> int:
    matches = (_HELPER.match(name) for name in names)
    return max((len(match[1]) for match in matches if match is not None), default=0)
