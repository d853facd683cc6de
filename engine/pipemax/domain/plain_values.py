"""Dataclasses as plain values, for JSON, YAML and other processes: objects, arrays, numbers and strings."""

from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from functools import cache
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints


def encode(value: object) -> Any:
    """Encode a value: dataclasses as objects without their None fields, sequences as arrays, enums by value."""
    if is_dataclass(value):
        pairs = ((field.name, getattr(value, field.name)) for field in fields(value))
        return {name: encode(item) for name, item in pairs if item is not None}
    if isinstance(value, tuple | list):
        return [encode(item) for item in value]
    return value.value if isinstance(value, Enum) else value


def decode(kind: Any, value: Any) -> Any:
    """Decode what ``encode`` returned, by the annotations of ``kind``. ``ValueError`` for an unknown or missing key."""
    if get_origin(kind) is UnionType:
        options = [option for option in get_args(kind) if option is not NoneType]
        kind = next((option for option in options if _is_of(option, value)), options[0])
    if isinstance(kind, type) and is_dataclass(kind):
        hints, needed = _keys(kind)
        if not isinstance(value, dict):
            raise ValueError(f"{kind.__name__} has the keys {sorted(hints)}, not the value {value!r}")
        if not needed <= value.keys() <= hints.keys():
            raise ValueError(f"{kind.__name__} has the keys {sorted(hints)}, not {sorted(value)}")
        return kind(**{name: decode(hints[name], item) for name, item in value.items()})
    if (sequence := get_origin(kind)) in (tuple, list):
        return sequence(decode(get_args(kind)[0], item) for item in value)
    return kind(value) if isinstance(kind, type) and issubclass(kind, Enum) else value


def _is_of(kind: Any, value: Any) -> bool:
    is_object = isinstance(kind, type) and is_dataclass(kind) and isinstance(value, dict)
    return is_object and value.keys() <= _keys(kind)[0].keys()


@cache
def _keys(kind: Any) -> tuple[dict[str, Any], frozenset[str]]:
    """Return the fields of a dataclass with their types, and the names of those without a default."""
    needed = (field for field in fields(kind) if field.default is field.default_factory is MISSING)
    return get_type_hints(kind), frozenset(field.name for field in needed)
