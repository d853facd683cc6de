"""Find which rows of the input are left: those that the output does not hold under the job's spec.

Only the output table decides. With id columns, a row is done when its ids are in the output. Without them, rows are
matched by the content of the whole row, with multiplicity: a row that occurs three times in the input is done when it
occurs three times in the output.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pipemax_spark.errors import JobError
from pipemax_spark.request.kept_by_json import types_in
from pipemax_spark.request.prompts import find_field
from pipemax_spark.rows.row_identity import identity
from pipemax_spark.spark.helper_columns import free_name
from pipemax_spark.spark.sql import quoted

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame
    from pyspark.sql.types import StructField, StructType

_KEY, _OCCURRENCE, _DONE = "__pipemax_key", "__pipemax_occurrence", "__pipemax_done"
_LEFT = "__pipemax_left"
_EXAMPLES = 3


def occurrence(key: str) -> "Column":
    """Return a column that numbers the rows of each value of the column ``key``: 1, 2, and so on.

    It does not matter which of several equal rows is the first, because they are interchangeable.
    """
    from pyspark.sql import Window
    from pyspark.sql import functions as F  # noqa: N812

    return F.row_number().over(Window.partitionBy(key).orderBy(key))


def check_id_type(field: "StructField") -> None:
    """Raise ``JobError`` for an id column whose values are not simply equal or different."""
    from pyspark.sql.types import CalendarIntervalType, MapType, StringType, VariantType

    for kind in types_in(field.dataType):
        # Strings that are equal by their collation may be different values.
        is_folded = isinstance(kind, StringType) and not kind.isUTF8BinaryCollation()
        if is_folded or isinstance(kind, MapType | VariantType | CalendarIntervalType):
            raise JobError(
                f"id column {field.name!r} is of type {field.dataType.simpleString()}, and rows cannot be matched by a "
                f"{kind.simpleString()}; cast it, name other id-columns, or leave id-columns out (rows are then "
                "matched by content)"
            )


def check_ids(
    rows: "DataFrame", id_columns: Sequence[str], *, shows_values: bool = True, then: str = ""
) -> None:
    """Raise ``JobError`` for ids that are null or not unique. One pass over the id columns.

    Examples are given only if ``shows_values``. ``then`` is what to do after the rows were changed.
    """
    from pyspark.sql import functions as F  # noqa: N812

    columns, times = [quoted(name) for name in id_columns], free_name(_OCCURRENCE, id_columns)
    is_null = " OR ".join(f"{column} IS NULL" for column in columns)
    wrong = (
        rows.groupBy(*columns)
        .agg(F.count(F.lit(1)).alias(times))
        .where(f"{is_null} OR {times} > 1")
        .orderBy(F.expr(is_null).desc(), *columns)
        .limit(_EXAMPLES)
        .collect()
    )
    if not wrong:
        return
    shown = "; ".join(
        ", ".join(f"{name}={row[name]!r}" for name in id_columns) + f" ({row[times]:,} rows)" for row in wrong
    )
    examples = f": {shown}" if shows_values else ""
    if any(row[name] is None for row in wrong for name in id_columns):
        raise JobError(
            f"id-columns {', '.join(id_columns)} hold nulls{examples}. Every row needs an id: fill them in{then}, or "
            "leave id-columns out (rows are then matched by content, with multiplicity)"
        )
    raise JobError(
        f"ids are not unique{examples}. Remove the duplicates{then}, name more id-columns, or leave id-columns out "
        "(rows are then matched by content, with multiplicity)"
    )


def check_columns(
    input_schema: "StructType",
    output_schema: "StructType",
    id_columns: Sequence[str],
    *,
    only_appended: bool = False,
) -> None:
    """Raise ``JobError`` if the input's rows cannot be compared with the output's, or cannot be added to them.

    With ``only_appended``, a column that is new in the input is null in all rows that the output may hold.
    """
    for field in input_schema.fields:
        same = find_field(field.name, output_schema)
        if same is not None and same.dataType.simpleString() != field.dataType.simpleString():
            raise JobError(
                f"column {field.name!r} is of type {field.dataType.simpleString()} in the input and of type "
                f"{same.dataType.simpleString()} in the output; cast it, or name another output"
            )
    new = [field.name for field in input_schema.fields if find_field(field.name, output_schema) is None]
    if new and not id_columns and not only_appended:
        raise JobError(
            f"the input has the column(s) {', '.join(new)}, which the output lacks, so its rows cannot be matched by "
            "content; give --id-columns, or name another output"
        )
    missing = [name for name in id_columns if name in new]
    if missing:
        raise JobError(
            f"the output has no column {missing[0]!r}, so its rows cannot be matched by it; name other id-columns"
        )


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
    found = rows.withColumn(key, F.expr(identity(rows.schema, rows.columns))).join(sent, on=key)
    numbered = found.withColumn(place, occurrence(key))
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
