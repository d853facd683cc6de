"""Make a key of a row's values that is equal for equal rows and for no others, whatever the session's settings are.

The key is a hash of the values as JSON. JSON alone would merge some rows and never match others: Spark prints dates and
times by the session's settings, replaces bytes of a string that are no UTF-8, and prints a map's key that is binary, an
array or a struct by its place in memory. So these are first turned into values that JSON keeps.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from pipemax_spark.prompts import find_field
from pipemax_spark.sql import literal, quoted

if TYPE_CHECKING:
    from pyspark.sql.types import DataType, StructType

_OPTIONS = {
    # Spark's defaults: times to the millisecond and in the session's time zone, and nulls by a setting of the session.
    "timestampNTZFormat": "yyyy-MM-dd HH:mm:ss.SSSSSS",
    "timeZone": "UTC",
    "ignoreNullFields": "true",
}


def identity(
    schema: "StructType", columns: Sequence[str], *, table: str | None = None, are_ids: bool = False
) -> str:
    """Return a SQL string expression that is equal for rows equal in all of these columns, and for no others.

    ``schema`` has the columns' types. The key depends only on the row's values: not on its place, its partition or the
    session's settings. 0.0 and -0.0 are the same only if the columns ``are_ids``, as in a join.
    """
    from pyspark.sql.types import StringType

    prefix = "" if table is None else f"{table}."
    fields: list[str] = []
    for place, name in enumerate(columns):
        field = find_field(name, schema)
        assert field is not None, f"no column {name} in {schema.names}"
        column = f"{prefix}{quoted(name)}"
        fields += [f"'{place}'", _kept_by_json(column, field.dataType, are_ids=are_ids)]
        if any(isinstance(part, StringType) for part in types_in(field.dataType)):
            text = f"cast({column} AS string)"
            fields += [f"'{place} bytes'", f"if(is_valid_utf8({text}), NULL, hex({text}))"]
    options = ", ".join(literal(text) for pair in _OPTIONS.items() for text in pair)
    return f"sha2(to_json(named_struct({', '.join(fields)}), map({options})), 256)"


def _kept_by_json(value: str, kind: "DataType", depth: int = 0, *, are_ids: bool) -> str:
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
                _kept_by_json(f"{value}.{quoted(f.name)}", f.dataType, depth, are_ids=are_ids)
                for f in kind.fields
            ]
            if all(part == f"{value}.{quoted(f.name)}" for part, f in zip(kept, kind.fields, strict=True)):
                return value
            fields = ", ".join(f"'{place}', {part}" for place, part in enumerate(kept))
            return f"if({value} IS NULL, NULL, named_struct({fields}))"
        case ArrayType():
            kept_element = _kept_by_json(inner, kind.elementType, depth + 1, are_ids=are_ids)
            return value if kept_element == inner else f"transform({value}, {inner} -> {kept_element})"
        case MapType():
            key, entry = (f"{inner}.{part}" for part in ("key", "value"))
            kept_key, kept_entry = (
                _kept_by_json(part, of, depth + 1, are_ids=are_ids)
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
