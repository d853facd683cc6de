"""Find which rows are left: those of one set of rows that another one, the rows that are done, does not hold.

With id columns, a row is done when its ids are. Without them, rows are matched by the content of the whole row, with
multiplicity: a row that occurs three times in the input is done when it occurs three times in the output. ``remaining``
says which rows these are.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pipemax_spark.request.prompts import find_field
from pipemax_spark.rows.row_identity import identity, occurrence
from pipemax_spark.spark.helper_columns import free_name
from pipemax_spark.spark.sql import quoted

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_KEY, _OCCURRENCE, _DONE = "__pipemax_key", "__pipemax_occurrence", "__pipemax_done"
_LEFT = "__pipemax_left"


def rows_left(
    rows: "DataFrame",
    done: "DataFrame | None",
    id_columns: Sequence[str],
    *,
    whole: "DataFrame | None" = None,
    are_few: bool = False,
) -> "DataFrame":
    """Return the rows that ``done`` (the output's rows under the spec, or None) does not hold.

    ``rows`` is the whole input or, if ``whole`` is given, a part of ``whole``. Without ids, a part's row is left only
    while the output holds fewer equal rows than the whole input does, so a part that comes a second time, or that was
    done in another run, adds nothing. With ``are_few``, all tasks get ``rows``, so that ``done`` is not shuffled.
    """
    if done is None:
        return rows
    if id_columns:
        ids = done.select(*map(quoted, id_columns))
        if are_few:
            ids = _found_in(ids, rows, id_columns)
        return rows.join(ids, on=list(id_columns), how="left_anti")
    return _rows_left_by_content(rows, done, whole, are_few=are_few)


def keys_left_by_content(rows: "DataFrame", done: "DataFrame") -> "DataFrame":
    """Return the keys of the rows that ``done`` does not hold, each with the number of such rows.

    Only keys are shuffled. For rows with ids, the ids of ``rows_left`` are such keys.
    """
    from pyspark.sql import functions as F  # noqa: N812

    counted = _signed(rows, rows.columns, 1).unionAll(_signed(done, rows.columns, -1))
    return counted.groupBy(_KEY).agg(F.sum(_DONE).alias(_LEFT)).where(F.col(_LEFT) > 0)


def number_of_rows(keys: "DataFrame", id_columns: Sequence[str]) -> int:
    """Return how many rows these keys represent."""
    from pyspark.sql import functions as F  # noqa: N812

    if id_columns:
        return int(keys.count())
    return int(keys.agg(F.coalesce(F.sum(_LEFT), F.lit(0))).collect()[0][0])


def rows_of_keys(
    rows: "DataFrame", keys: "DataFrame", id_columns: Sequence[str], *, are_few: bool = False
) -> "DataFrame":
    """Return the rows that the keys represent; keys are ids, or the result of ``keys_left_by_content``.

    With ``are_few``, all tasks get ``keys``, so that ``rows`` are not shuffled.
    """
    from pyspark.sql import functions as F  # noqa: N812

    key, place, left = (free_name(helper, rows.columns) for helper in (_KEY, _OCCURRENCE, _LEFT))
    named = keys if id_columns else keys.toDF(key, left)
    sent = F.broadcast(named) if are_few else named
    if id_columns:
        return rows.join(sent, on=list(id_columns), how="left_semi")
    matching = rows.withColumn(key, F.expr(identity(rows.schema, rows.columns))).join(sent, on=key)
    numbered = matching.withColumn(place, occurrence(key))
    return numbered.where(F.col(place) <= F.col(left)).select(*map(quoted, rows.columns))


def _found_in(frame: "DataFrame", few: "DataFrame", columns: Sequence[str]) -> "DataFrame":
    """Return the rows of ``frame`` whose ``columns`` occur in ``few``, which is sent to all tasks."""
    from pyspark.sql import functions as F  # noqa: N812

    return frame.join(F.broadcast(few.select(*map(quoted, columns))), on=list(columns), how="left_semi")


def _rows_left_by_content(
    rows: "DataFrame", done: "DataFrame", whole: "DataFrame | None", *, are_few: bool
) -> "DataFrame":
    from pyspark.sql import functions as F  # noqa: N812

    columns = [quoted(name) for name in rows.columns]
    counted_as_done = _signed(done, rows.columns, 1)
    if whole is not None:
        # Rows of the whole input that are not in this part need their own outputs, now or later, so do not count those
        # outputs for this part.
        counted_as_done = counted_as_done.unionAll(_signed(whole, rows.columns, -1))
        counted_as_done = counted_as_done.unionAll(_signed(rows, rows.columns, 1))
    if are_few:
        counted_as_done = _found_in(counted_as_done, _signed(rows, rows.columns, 1), [_KEY])
    done_counts = counted_as_done.groupBy(_KEY).agg(F.sum(_DONE).alias(_DONE))
    content = F.expr(identity(rows.schema, rows.columns))
    key, place, num_done = (free_name(helper, rows.columns) for helper in (_KEY, _OCCURRENCE, _DONE))
    counted = rows.withColumn(key, content).withColumn(place, occurrence(key))
    left = counted.join(done_counts.toDF(key, num_done), on=key, how="left").where(
        F.col(place) > F.coalesce(F.col(num_done), F.lit(0))
    )
    return left.select(*columns)


def _signed(frame: "DataFrame", columns: Sequence[str], sign: int) -> "DataFrame":
    """Return the key of each row's content in these columns, and ``sign``."""
    from pyspark.sql import functions as F  # noqa: N812

    # A column that was added later is null in older rows, and JSON leaves nulls out.
    nulls = [F.lit(None).alias(name) for name in columns if find_field(name, frame.schema) is None]
    known = [quoted(name) for name in columns if find_field(name, frame.schema) is not None]
    completed = frame.select(*known, *nulls)
    content = F.expr(identity(completed.schema, columns))
    return completed.select(content.alias(_KEY), F.lit(sign).alias(_DONE))
