"""Convert a user's struct column of per-row options into the overrides of a request."""

import pyarrow as pa
import pyarrow.compute as pc

from pipemax.wire import OVERRIDES_TYPE
from pipemax_spark.errors import JobError

OVERRIDE_FIELDS: dict[str, pa.DataType] = {field.name: field.type for field in OVERRIDES_TYPE}


def overrides_of(options: pa.Array) -> pa.StructArray:
    """Return the options as an array of ``OVERRIDES_TYPE``, with null for each field that they lack.

    Raise ``JobError`` that names a wrong field or type.
    """
    if pa.types.is_null(options.type):
        return pa.nulls(len(options), OVERRIDES_TYPE)
    if not pa.types.is_struct(options.type):
        raise JobError(f"the options of a row are of the type {options.type}; give {_wanted()}")
    names = [field.name for field in options.type]
    if unknown := [name for name in names if name not in OVERRIDE_FIELDS]:
        raise JobError(f"the options of a row have the field {unknown[0]!r}; give {_wanted()}")
    columns = [
        _cast(name, pc.struct_field(options, [names.index(name)]))
        if name in names
        else pa.nulls(len(options), kind)
        for name, kind in OVERRIDE_FIELDS.items()
    ]
    return pa.StructArray.from_arrays(columns, fields=list(OVERRIDES_TYPE), mask=options.is_null())


def _cast(name: str, column: pa.Array) -> pa.Array:
    kind = OVERRIDE_FIELDS[name]
    if not _fits(column.type, kind):
        raise JobError(f"the option {name} of a row is of the type {column.type}; it must be {_name(kind)}")
    try:
        return column.cast(kind)
    except pa.ArrowInvalid as error:
        raise JobError(f"the option {name} of a row is no {_name(kind)}: {error}") from error


def _fits(given: pa.DataType, wanted: pa.DataType) -> bool:
    if pa.types.is_null(given):
        return True
    if pa.types.is_string(wanted):
        return bool(pa.types.is_string(given) or pa.types.is_large_string(given))
    if pa.types.is_integer(given):
        return not pa.types.is_list(wanted)
    if pa.types.is_floating(wanted):
        return bool(pa.types.is_floating(given) or pa.types.is_decimal(given))
    # SQL's array() has elements of the type null.
    return bool(
        pa.types.is_list(wanted)
        and pa.types.is_list(given)
        and (pa.types.is_string(given.value_type) or pa.types.is_null(given.value_type))
    )


def _wanted() -> str:
    return f"a struct with any of {', '.join(OVERRIDE_FIELDS)}"


def _name(kind: pa.DataType) -> str:
    names = {pa.int32(): "int", pa.int64(): "bigint", pa.float64(): "double", pa.string(): "string"}
    return names.get(kind, "array<string>")
