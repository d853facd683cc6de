"""Name the values that a partitioned table stores as other values.

Delta keeps the value of a partition column as text, as Hive did: an empty text stands for null, bytes that are no
UTF-8 are replaced, and a time is written as a clock shows it, without its year's era. Iceberg keeps all values but
strings with such bytes.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipemax_spark.request.prompts import find_field
from pipemax_spark.spark.sql import quoted

if TYPE_CHECKING:
    from pyspark.sql.types import DataType, StructType

_HIVE_NULL = "__HIVE_DEFAULT_PARTITION__"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangedValues:
    """Some values of a column, and what the table stores in their place."""

    column: str
    condition: str
    """SQL that is true for them."""
    values: str
    """Their description, as in "has …"."""
    stored: str
    """What becomes of them, as in "which is …"."""
    become_null: bool = False


def changed_in_delta(schema: "StructType", columns: Sequence[str]) -> list[ChangedValues]:
    """Return the values of rows of this schema that a Delta table partitioned by these columns would not keep."""
    return [changed for name in columns for changed in _changed_in_delta(name, schema)]


def changed_in_iceberg(schema: "StructType", columns: Sequence[str]) -> list[ChangedValues]:
    """Return the values of rows of this schema that an Iceberg table partitioned by these columns would not keep.

    Iceberg can partition by a field of a struct, which has the name ``column.field``.
    """
    from pyspark.sql.types import StringType

    columns_found = ((name, _find(name, schema)) for name in columns)
    return [
        _not_utf8(name, column[0])
        for name, column in columns_found
        if column is not None and isinstance(column[1], StringType)
    ]


def _changed_in_delta(name: str, schema: "StructType") -> Iterator[ChangedValues]:
    from pyspark.sql.types import BinaryType, StringType, TimestampType

    field = find_field(name, schema)
    column = quoted(name)
    match None if field is None else field.dataType:
        case StringType() | BinaryType():
            text = f"cast({column} AS string)"
            yield ChangedValues(
                column=name,
                condition=f"{text} IN ('', '{_HIVE_NULL}')",
                values=f"an empty value (or {_HIVE_NULL})",
                stored="stored as null",
                become_null=True,
            )
            yield _not_utf8(name, text)
            yield ChangedValues(
                column=name,
                condition=f"instr({text}, char(0)) > 0",
                values="a NUL character",
                stored="not possible in a file's path",
            )
        case TimestampType():
            yield ChangedValues(
                column=name,
                condition=f"year({column}) < 1 OR NOT try_cast(cast({column} AS string) AS timestamp) <=> {column}",
                values="a time that the clock of the session's time zone shows twice, or of before the year 1",
                stored="stored as another time (set spark.sql.session.timeZone to UTC for the former)",
            )
        case _:
            pass


def _not_utf8(name: str, text: str) -> ChangedValues:
    return ChangedValues(
        column=name,
        condition=f"NOT is_valid_utf8({text})",
        values="bytes that are no UTF-8",
        stored="stored as other bytes",
    )


def _find(name: str, schema: "StructType") -> "tuple[str, DataType] | None":
    """Return the SQL and the type of a column, or of a field of a struct by its path; None if there is none."""
    from pyspark.sql.types import StructType

    if (field := find_field(name, schema)) is not None:
        return quoted(field.name), field.dataType
    outer, _, rest = name.partition(".")
    field = find_field(outer, schema)
    if field is None or not isinstance(field.dataType, StructType):
        return None
    inner = _find(rest, field.dataType)
    return None if inner is None else (f"{quoted(field.name)}.{inner[0]}", inner[1])
