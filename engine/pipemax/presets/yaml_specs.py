"""Build the frozen specs of ``pipemax.domain`` from YAML, and replace single numbers in them.

This is the only way from YAML to those specs. Unknown and missing keys are rejected, and every message names the file.
"""

import dataclasses
import types
import typing
from collections.abc import Mapping
from enum import StrEnum
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeVar

import yaml

Spec = TypeVar("Spec")


def read_yaml(path: Path | None, shipped: str) -> Any:
    """Return what a YAML file says: the one at ``path``, otherwise the one of this package at ``shipped``."""
    source = files(__package__).joinpath(shipped) if path is None else path
    return yaml.safe_load(source.read_text(encoding="utf-8"))


def build_spec(spec_type: type[Spec], values: dict[str, Any], where: str) -> Spec:
    """Build a (nested) frozen dataclass from parsed YAML; a field with a default may be left out.

    Raise ``ValueError`` that names a key that is unknown, missing or not a number.
    """
    hints = typing.get_type_hints(spec_type)
    unknown, missing = sorted(values.keys() - hints.keys()), sorted(_required(spec_type) - values.keys())
    if unknown or missing:
        raise ValueError(f"{where}: unknown keys {unknown}, missing keys {missing}")
    converted: dict[str, Any] = {}
    for key, hint in hints.items():
        if key not in values:
            continue
        value = values[key]
        if isinstance(hint, types.UnionType):  # ``int | None``
            if value is None:
                converted[key] = None
                continue
            (hint,) = (one for one in typing.get_args(hint) if one is not types.NoneType)
        if dataclasses.is_dataclass(hint):
            if not isinstance(value, dict):
                raise ValueError(f"{where}: {key} must have keys of its own, got {value!r}")
            value = build_spec(typing.cast(type[Any], hint), value, f"{where}: {key}")
        elif typing.get_origin(hint) is tuple:
            value = _tuple_of(typing.get_args(hint)[0], value, f"{where}: {key}")
        elif isinstance(hint, type) and issubclass(hint, StrEnum):
            if value not in [*hint]:
                raise ValueError(f"{where}: {key} must be {' or '.join(hint)}, got {value!r}")
            value = hint(value)
        elif hint in (int, float):
            try:
                value = hint(value)
            except (TypeError, ValueError):
                raise ValueError(f"{where}: {key} must be a number, got {value!r}") from None
        converted[key] = value
    try:
        return spec_type(**converted)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def _required(spec_type: type[Any]) -> set[str]:
    return {
        field.name
        for field in dataclasses.fields(spec_type)
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    }


def _tuple_of(kind: Any, value: Any, where: str) -> tuple[Any, ...]:
    """Return a list as a tuple of this kind: of rows of two integers, of integers, or of words."""
    is_of_rows = typing.get_origin(kind) is tuple
    try:
        if is_of_rows:
            return tuple((int(first), int(second)) for first, second in value)
        if isinstance(value, str):  # a word is a sequence of letters
            raise TypeError
        return tuple(kind(one) for one in value)
    except (TypeError, ValueError):
        what = "rows of two integers" if is_of_rows else f"a list of {'integers' if kind is int else 'words'}"
        raise ValueError(f"{where} must be {what}, got {value!r}") from None


def override(spec: Spec, values: Mapping[str, float]) -> Spec:
    """Return a copy with numbers replaced, named by dotted paths: ``{"all_reduce.bus_bytes_per_s": 10e9}``."""
    for path, value in values.items():
        spec = _override_one(spec, path, path.split("."), value)
    return spec


def _override_one(spec: Any, path: str, names: list[str], value: float) -> Any:
    known = {field.name: getattr(spec, field.name) for field in dataclasses.fields(spec)}
    name, *rest = names
    if name not in known:
        raise ValueError(f"{path}: there is no {name!r}; there are {', '.join(known)}")
    old = known[name]
    if rest:
        if not dataclasses.is_dataclass(old):
            raise ValueError(f"{path}: {name} has no parts")
        new = _override_one(old, path, rest, value)
    elif isinstance(old, int | float):
        new = type(old)(value)
    else:
        raise ValueError(f"{path}: {name} is no number")
    return dataclasses.replace(spec, **{name: new})
