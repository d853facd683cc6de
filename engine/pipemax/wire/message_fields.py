"""Write a message's fields besides its role and content, such as ``tool_calls``, as the JSON text that travels.

A field that says nothing (null, an empty array or object) is left out: clients write them, and no template need read
them. A value that JSON cannot hold is its row's error, by name. What a template does with them is not known here.
"""

import json
import math
from collections.abc import Container, Iterable, Mapping
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

from pipemax.wire.row_faults import RowFaultError, encodable, shown
from pipemax.wire.rows import ErrorCode


def joined_parts(texts: Iterable[str]) -> str:
    """Return the text of a message in parts as vLLM gives it to templates that take text only. The one such rule."""
    return "\n".join(texts)


def fields_text(fields: Mapping[str, Any], *, of_structs: Container[str] = ()) -> str | None:
    """Return the JSON text of a message's further fields, or None if there are none.

    Nulls within the values of fields in ``of_structs`` are left out as well: a struct holds one for each key that
    another row has. Raise ``RowFaultError`` that names a field which cannot be passed on.
    """
    plain: dict[str, Any] = {}
    for name, value in fields.items():
        if value is None or value in ([], {}):
            continue
        try:
            plain[encodable(name)] = _plain(value, drops_nulls=name in of_structs)
        except ValueError as error:
            raise RowFaultError(
                ErrorCode.INVALID_PROMPT,
                f"the field {encodable(name)!r} of a message cannot be passed on: {error}",
            ) from None
        except RecursionError:
            raise RowFaultError(
                ErrorCode.INVALID_PROMPT,
                f"the field {encodable(name)!r} of a message cannot be passed on: it is nested too deeply",
            ) from None
    # In one order, whatever order a table's columns have: the text is part of what makes requests equal.
    return json.dumps(dict(sorted(plain.items())), ensure_ascii=False) if plain else None


def _plain(value: Any, *, drops_nulls: bool) -> Any:
    """Return a value as JSON has it. ``ValueError`` says why there is none."""
    match value:
        case None | bool() | int():
            return value
        case str():
            return encodable(value)
        case float() if math.isfinite(value):
            return value
        case Decimal() if value.is_finite():
            return int(value) if value == value.to_integral_value() else float(value)
        case datetime():
            # Spark's timestamps come in the session's time zone, and no prompt may depend on that.
            return (value if value.tzinfo is None else value.astimezone(UTC)).isoformat()
        case date():
            return value.isoformat()
        case [tuple(), *_]:  # a map, as pyarrow gives it
            return _plain(dict(value), drops_nulls=drops_nulls)
        case list() | tuple():
            return [_plain(part, drops_nulls=drops_nulls) for part in value]
        case dict():
            return {
                encodable(key if isinstance(key, str) else str(key)): _plain(part, drops_nulls=drops_nulls)
                for key, part in value.items()
                if part is not None or not drops_nulls
            }
        case Exception():
            raise ValueError("it is no text that can be read")
    raise ValueError(f"{shown(value)} ({type(value).__name__}) is nothing that JSON can hold")
