"""Check that the columns by which rows are matched can tell them apart, in the input and in the output."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pipemax_spark.errors import JobError
from pipemax_spark.request.kept_by_json import types_in
from pipemax_spark.request.prompts import find_field
from pipemax_spark.spark.helper_columns import free_name
from pipemax_spark.spark.sql import quoted

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.types import StructField, StructType

FEW_ROWS = 500_000
"""The ids of this many rows, or the hashes of their content, take about 50 MB in each executor."""
_OCCURRENCE = "__pipemax_occurrence"
_EXAMPLES = 3


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
