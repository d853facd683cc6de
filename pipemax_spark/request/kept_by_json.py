"""Turn values into such that JSON keeps, so that a hash of the JSON is equal for equal values and for no others.

JSON alone would merge some values and never match others: Spark prints dates and times by the session's settings,
replaces bytes of a string that are no UTF-8, and prints a map's key that is binary, an array or a struct by its place
in memory.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pipemax_spark.spark.sql import quoted

if TYPE_CHECKING:
    from pyspark.sql.types import DataType

OPTIONS = {
    # Spark's defaults: times to the millisecond and in the session's time zone, and nulls by a setting of the session.
    "timestampNTZFormat": "yyyy-MM-dd HH:mm:ss.SSSSSS",
    "timeZone": "UTC",
    "ignoreNullFields": "true",
}
"""Options of ``to_json`` under which no setting of the session changes the text."""


def has_text(kind: "DataType") -> bool:
    """Tell whether values of the type have text in them, whose bytes may be no UTF-8."""
    from pyspark.sql.types import StringType

    return any(isinstance(part, StringType) for part in types_in(kind))


def other_bytes(value: str) -> str:
    """Return a SQL expression of a value's bytes if they are no UTF-8, else of null."""
    text = f"cast({value} AS string)"
    return f"if(is_valid_utf8({text}), NULL, hex({text}))"


def kept_by_json(value: str, kind: "DataType", depth: int = 0, *, are_ids: bool) -> str:
    """Return a SQL expression on the value of which JSON keeps everything; the value itself if JSON keeps it."""
    from pyspark.sql.types import ArrayType, DateType, FractionalType, MapType, StructType, TimestampType

    inner = f"v{depth}"
    match kind:
        case DateType():
            return f"unix_date({value})"
        case TimestampType():
            return f"unix_micros({value})"
        case FractionalType() if are_ids:
            return f"if({value} = 0, cast(0 AS {kind.simpleString()}), {value})"
        case StructType():
            kept = [
                kept_by_json(f"{value}.{quoted(f.name)}", f.dataType, depth, are_ids=are_ids)
                for f in kind.fields
            ]
            if all(part == f"{value}.{quoted(f.name)}" for part, f in zip(kept, kind.fields, strict=True)):
                return value
            fields = ", ".join(f"'{place}', {part}" for place, part in enumerate(kept))
            return f"if({value} IS NULL, NULL, named_struct({fields}))"
        case ArrayType():
            kept_element = kept_by_json(inner, kind.elementType, depth + 1, are_ids=are_ids)
            return value if kept_element == inner else f"transform({value}, {inner} -> {kept_element})"
        case MapType():
            key, entry = (f"{inner}.{part}" for part in ("key", "value"))
            kept_key, kept_entry = (
                kept_by_json(part, of, depth + 1, are_ids=are_ids)
                for part, of in ((key, kind.keyType), (entry, kind.valueType))
            )
            if _is_printed(kind.keyType) and kept_entry == entry:
                return value
            pair = f"named_struct('key', {kept_key}, 'value', {kept_entry})"
            return f"transform(map_entries({value}), {inner} -> {pair})"
        case _:
            return value


def _is_printed(key: "DataType") -> bool:
    """Tell whether JSON has a map's key of this type as text that tells it from other keys."""
    from pyspark.sql.types import IntegralType, StringType

    return isinstance(key, IntegralType | StringType)


def types_in(kind: "DataType") -> Iterator["DataType"]:
    """Yield the type and all types within it."""
    from pyspark.sql.types import ArrayType, MapType, StructType

    yield kind
    match kind:
        case StructType():
            inner = [field.dataType for field in kind.fields]
        case ArrayType():
            inner = [kind.elementType]
        case MapType():
            inner = [kind.keyType, kind.valueType]
        case _:
            inner = []
    for part in inner:
        yield from types_in(part)
