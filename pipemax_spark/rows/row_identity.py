"""Make a key of a row's values that is equal for equal rows and for no others, whatever the session's settings are."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pipemax_spark.request.kept_by_json import OPTIONS, has_text, kept_by_json, other_bytes
from pipemax_spark.request.prompts import find_field
from pipemax_spark.spark.sql import literal, quoted

if TYPE_CHECKING:
    from pyspark.sql import Column
    from pyspark.sql.types import StructType


def identity(
    schema: "StructType", columns: Sequence[str], *, table: str | None = None, are_ids: bool = False
) -> str:
    """Return a SQL string expression that is equal for rows equal in all of these columns, and for no others.

    ``schema`` has the columns' types. The key depends only on the row's values: not on its place, its partition or the
    session's settings. 0.0 and -0.0 are the same only if the columns ``are_ids``, as in a join.
    """
    prefix = "" if table is None else f"{table}."
    fields: list[str] = []
    for place, name in enumerate(columns):
        field = find_field(name, schema)
        assert field is not None, f"no column {name} in {schema.names}"
        column = f"{prefix}{quoted(name)}"
        fields += [f"'{place}'", kept_by_json(column, field.dataType, are_ids=are_ids)]
        if has_text(field.dataType):
            fields += [f"'{place} bytes'", other_bytes(column)]
    options = ", ".join(literal(text) for pair in OPTIONS.items() for text in pair)
    return f"sha2(to_json(named_struct({', '.join(fields)}), map({options})), 256)"


def occurrence(key: str) -> "Column":
    """Return a column that numbers the rows of each value of the column ``key``: 1, 2, and so on.

    It does not matter which of several equal rows is the first, because they are interchangeable.
    """
    from pyspark.sql import Window
    from pyspark.sql import functions as F  # noqa: N812

    return F.row_number().over(Window.partitionBy(key).orderBy(key))
