"""Convert a user's struct column of per-row options into the overrides of a request, row by row.

A column of a wrong type is refused; a value that does not fit is its row's ``invalid_parameter``. The job,
``annotate()`` and the UDF all convert here, so no setting of Spark's changes what becomes of a value.
"""

import pyarrow as pa

from pipemax.wire import (
    OVERRIDES_TYPE,
    ErrorCode,
    RequestError,
    guarded_all,
    python_values,
    row_setting,
)
from pipemax_spark.errors import JobError

OVERRIDE_FIELDS: dict[str, pa.DataType] = {field.name: field.type for field in OVERRIDES_TYPE}


def check_overrides(kind: pa.DataType) -> None:
    """Raise ``JobError`` that names the field or the type with which options cannot be those of rows."""
    if pa.types.is_null(kind):
        return
    if not pa.types.is_struct(kind):
        raise JobError(f"the options of a row are of the type {kind}; give {_wanted()}")
    names = [field.name for field in kind]
    if doubled := next((name for name in names if names.count(name) > 1), None):
        raise JobError(f"the options of a row have the field {doubled!r} twice; give it once")
    for field in kind:
        if field.name not in OVERRIDE_FIELDS:
            raise JobError(f"the options of a row have the field {field.name!r}; give {_wanted()}")
        if not _can_fit(field.type, OVERRIDE_FIELDS[field.name]):
            raise JobError(
                f"the option {field.name} of a row is of the type {field.type}; it must be "
                f"{_name(OVERRIDE_FIELDS[field.name])}"
            )


def overrides_of(options: pa.Array) -> tuple[pa.StructArray, list[RequestError | None]]:
    """Return the options as an array of ``OVERRIDES_TYPE``, and the error of each row whose options do not fit.

    Fields that the options lack are null. Raise ``JobError`` as ``check_overrides`` does.
    """
    check_overrides(options.type)
    no_faults: list[RequestError | None] = [None] * len(options)
    if pa.types.is_null(options.type):
        return pa.nulls(len(options), OVERRIDES_TYPE), no_faults
    if options.type == OVERRIDES_TYPE:
        return options, no_faults
    # Field by field: a text that is no UTF-8 is then the fault of its own field.
    columns = [python_values(options.field(place)) for place in range(len(options.type))]
    rows = [
        None if is_null else dict(zip([field.name for field in options.type], values, strict=True))
        for is_null, *values in zip(options.is_null().to_pylist(), *columns, strict=True)
    ]
    settings, faults = guarded_all(_settings, rows, ErrorCode.INVALID_PARAMETER)
    return pa.array(settings, OVERRIDES_TYPE), faults


def _settings(row: dict[str, object] | None) -> dict[str, object] | None:
    return row and {name: row_setting(name, value) for name, value in row.items()}


def _can_fit(kind: pa.DataType, wanted: pa.DataType) -> bool:
    """Tell whether values of a type may be values of a setting; which of them are, each row tells."""
    if pa.types.is_null(kind):
        return True
    if _is_text(kind):
        return True
    if pa.types.is_list(wanted):
        is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind)
        # SQL's array() has elements of the type null.
        return _can_fit(kind.value_type if is_list else kind, wanted.value_type)
    if pa.types.is_boolean(wanted) or pa.types.is_boolean(kind):
        return bool(wanted == kind)
    is_number = pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind)
    return bool(is_number and not pa.types.is_string(wanted))


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _wanted() -> str:
    return f"a struct with any of {', '.join(OVERRIDE_FIELDS)}"


def _name(kind: pa.DataType) -> str:
    if pa.types.is_list(kind):
        return (
            "string or array<string>"
            if pa.types.is_string(kind.value_type)
            else "array<int>, or one int or string"
        )
    if pa.types.is_string(kind):
        return "string"
    if pa.types.is_boolean(kind):
        return "boolean or string"
    return f"{'int' if pa.types.is_integer(kind) else 'double'}, another number, or string"
