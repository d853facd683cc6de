"""Messages between processes: dataclasses of plain values, which cross as one JSON object each."""

import json
from dataclasses import asdict, dataclass, is_dataclass
from enum import StrEnum
from functools import lru_cache
from types import UnionType
from typing import Any, Self, get_args, get_origin, get_type_hints


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """A message; its fields are plain values, texts of an enum, and dataclasses, tuples or dicts of these."""

    def to_bytes(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_bytes(cls, text: bytes) -> Self:
        """Return the message. Raise ``ValueError``, ``KeyError`` or ``TypeError`` for what is none of this version."""
        return cls.of_json(json.loads(text))

    @classmethod
    def of_json(cls, values: dict[str, Any]) -> Self:
        """Return the message that became these plain values."""
        message: Self = _value(cls, values)
        return message


def _value(kind: Any, value: Any) -> Any:
    """Return a value of JSON as one of this type."""
    if value is None:
        return None
    inner = get_args(kind)
    match get_origin(kind):
        case origin if origin is UnionType:
            (kind,) = (member for member in inner if member is not type(None))
            return _value(kind, value)
        case origin if origin is tuple:
            return tuple(_value(inner[0], part) for part in value)
        case origin if origin is list:
            return [_value(inner[0], part) for part in value]
        case origin if origin is dict:
            return {name: _value(inner[1], part) for name, part in value.items()}
    if isinstance(kind, type) and is_dataclass(kind):
        hints = _hints(kind)
        return kind(**{name: _value(hints[name], part) for name, part in dict(value).items()})
    return kind(value) if isinstance(kind, type) and issubclass(kind, StrEnum) else value


_hints = lru_cache(get_type_hints)
