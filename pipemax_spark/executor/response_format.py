"""Turn a JSON schema into the type of ``annotation.parsed``, and an output's text into a value of that type.

| JSON schema | Spark |
|---|---|
| object with properties | struct of them, in the schema's order |
| object without, with additionalProperties: {schema} | map<string, …> |
| array with items: {schema} | array<…> |
| string; enum and const of strings | string |
| integer; enum and const of integers | bigint |
| number | double |
| boolean | boolean |
| ["…", "null"], anyOf or oneOf with null | the other, nullable |
| $ref to #/… of the same schema | what it refers to |
| anything else (other unions, mixed enums, tuples, free objects, recursion) | string that holds the value's JSON |

Every Spark field is nullable, because properties may be left out. Parsing checks types, enums and consts, required
properties and the 64-bit range. It does not check bounds, patterns, lengths and formats, which the engine enforces
while it generates. Properties that the schema does not name are dropped here and stay in ``annotation.text``.

This module needs only pyarrow, because it runs in the tasks. It does not decide whether a schema is valid: the
preflight does, on the engine's side, which has ``jsonschema``.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NoReturn, Protocol

import pyarrow as pa


class Parser(Protocol):
    """A part of a compiled schema."""

    @property
    def arrow_type(self) -> pa.DataType: ...

    def convert(self, value: object, where: str) -> object:
        """Return the value as pyarrow takes it for ``arrow_type``.

        ``ValueError`` says what at ``where`` does not fit.
        """


@dataclass(frozen=True, slots=True)
class _Json:
    """A value that no Spark type holds, kept as JSON text."""

    arrow_type = pa.string()

    def convert(self, value: object, where: str) -> str:
        return json.dumps(value, ensure_ascii=False)


@dataclass(frozen=True, slots=True)
class _String:
    arrow_type = pa.string()

    def convert(self, value: object, where: str) -> str:
        if not isinstance(value, str):
            raise _misfit(value, where, "a string")
        return value


@dataclass(frozen=True, slots=True)
class _Integer:
    arrow_type = pa.int64()

    def convert(self, value: object, where: str) -> int:
        # JSON schema takes 3.0 as an integer; Python takes True as one. Infinity, from 1e999, fails the comparison.
        if isinstance(value, bool) or not isinstance(value, int | float) or value != value // 1:
            raise _misfit(value, where, "an integer")
        if not -(2**63) <= value < 2**63:
            raise _misfit(value, where, "an integer of 64 bits")
        return int(value)


@dataclass(frozen=True, slots=True)
class _Number:
    arrow_type = pa.float64()

    def convert(self, value: object, where: str) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise _misfit(value, where, "a number")
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if not math.isfinite(number):
            raise _misfit(value, where, "a number of 64 bits")
        return number


@dataclass(frozen=True, slots=True)
class _Boolean:
    arrow_type = pa.bool_()

    def convert(self, value: object, where: str) -> bool:
        if not isinstance(value, bool):
            raise _misfit(value, where, "true or false")
        return value


@dataclass(frozen=True, slots=True)
class _Nullable:
    inner: Parser

    @property
    def arrow_type(self) -> pa.DataType:
        return self.inner.arrow_type

    def convert(self, value: object, where: str) -> object:
        return None if value is None else self.inner.convert(value, where)


@dataclass(frozen=True, slots=True)
class _OneOf:
    """An enum or const whose values are all of one scalar type."""

    inner: Parser
    allowed: tuple[object, ...]

    @property
    def arrow_type(self) -> pa.DataType:
        return self.inner.arrow_type

    def convert(self, value: object, where: str) -> object:
        converted = self.inner.convert(value, where)
        if converted not in self.allowed:
            raise _misfit(value, where, f"one of {json.dumps(self.allowed[:20])}")
        return converted


@dataclass(frozen=True, slots=True)
class _Array:
    items: Parser

    @property
    def arrow_type(self) -> pa.DataType:
        return pa.list_(self.items.arrow_type)

    def convert(self, value: object, where: str) -> list[object]:
        if not isinstance(value, list):
            raise _misfit(value, where, "an array")
        return [self.items.convert(item, f"{where}[{i}]") for i, item in enumerate(value)]


@dataclass(frozen=True, slots=True)
class _Map:
    values: Parser

    @property
    def arrow_type(self) -> pa.DataType:
        return pa.map_(pa.string(), self.values.arrow_type)

    def convert(self, value: object, where: str) -> list[tuple[str, object]]:
        if not isinstance(value, dict):
            raise _misfit(value, where, "an object")
        return [(name, self.values.convert(part, f"{where}.{name}")) for name, part in value.items()]


@dataclass(frozen=True, slots=True)
class _Struct:
    properties: tuple[tuple[str, Parser], ...]
    required: frozenset[str]

    @property
    def arrow_type(self) -> pa.DataType:
        return pa.struct([(name, part.arrow_type) for name, part in self.properties])

    def convert(self, value: object, where: str) -> dict[str, object]:
        if not isinstance(value, dict):
            raise _misfit(value, where, "an object")
        missing = sorted(self.required - value.keys())
        if missing:
            raise ValueError(f"{where} lacks the required property {missing[0]!r}")
        return {
            name: part.convert(value[name], f"{where}.{name}") if name in value else None
            for name, part in self.properties
        }


def load_schema(text: str) -> dict[str, Any]:
    """Read a schema from its text. Raise ``ValueError`` if the text cannot be one."""
    try:
        schema = json.loads(text)
    except ValueError as error:
        raise ValueError(f"response-format is not JSON: {error}") from error
    if not isinstance(schema, dict):
        raise ValueError(
            f"response-format must be a JSON object that holds a schema, got {json.dumps(schema)[:80]}"
        )
    return schema


def compile_schema(schema: Mapping[str, Any]) -> Parser:
    """Return the parser for a schema. Raise ``ValueError`` for a schema whose values no table can hold."""
    return _compile(schema, _Place(root=schema, path="response-format"))


def parse(text: str, parser: Parser) -> object:
    """Return the value in an output's text. ``ValueError`` says what does not fit."""
    try:
        value = json.loads(text, parse_constant=_no_constant)
    except ValueError as error:
        raise ValueError(f"the output is no JSON ({error}); was it cut by max_tokens?") from error
    except RecursionError:
        raise ValueError("the output is JSON nested too deeply to be parsed") from None
    return parser.convert(value, "output")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """The compiler's place in a schema."""

    root: Mapping[str, Any]
    path: str
    following: frozenset[str] = frozenset()
    """The references that led here: meeting one of them again is recursion, which no Spark type can hold."""

    def below(self, name: str) -> "_Place":
        return replace(self, path=f"{self.path}{name}")


def _compile(schema: object, place: _Place) -> Parser:
    if not isinstance(schema, Mapping):
        return _Json()  # true and false are schemas too
    if (reference := schema.get("$ref")) is not None:
        if reference in place.following:
            return _Json()
        target = _resolve(reference, place)
        return _compile(target, replace(place, following=place.following | {reference}))
    options = schema.get("anyOf") or schema.get("oneOf") or schema.get("allOf")
    if options is not None and "type" not in schema:
        return _compile_union(options, place)
    if "enum" in schema or "const" in schema:
        return _compile_enum(schema.get("enum", [schema.get("const")]))
    kinds = schema.get("type")
    if isinstance(kinds, list):
        rest = [kind for kind in kinds if kind != "null"]
        if len(rest) != 1:
            return _Json()
        inner = _compile({**schema, "type": rest[0]}, place)
        return _Nullable(inner) if len(rest) < len(kinds) else inner
    match kinds:
        case "string":
            return _String()
        case "integer":
            return _Integer()
        case "number":
            return _Number()
        case "boolean":
            return _Boolean()
        case "array" if isinstance(schema.get("items"), Mapping) and "prefixItems" not in schema:
            return _Array(_compile(schema["items"], place.below("[]")))
        case "object":
            return _compile_object(schema, place)
        case _:
            return _Json()


def _compile_object(schema: Mapping[str, Any], place: _Place) -> Parser:
    properties = schema.get("properties") or {}
    others = schema.get("additionalProperties")
    if not properties:
        if isinstance(others, Mapping) and others:
            return _Map(_compile(others, place.below(".*")))
        return _Json()
    by_lower: dict[str, str] = {}
    for name in properties:
        if (other := by_lower.setdefault(name.lower(), name)) != name:
            raise ValueError(
                f"{place.path} has the properties {other!r} and {name!r}, which differ by case alone: no table can "
                "hold both; rename one"
            )
    parts = tuple((name, _compile(part, place.below(f".{name}"))) for name, part in properties.items())
    return _Struct(parts, frozenset(schema.get("required", ())) & properties.keys())


def _compile_union(options: list[object], place: _Place) -> Parser:
    rest = [option for option in options if option != {"type": "null"}]
    if len(rest) != 1:
        return _Json()
    inner = _compile(rest[0], place)
    return _Nullable(inner) if len(rest) < len(options) else inner


def _compile_enum(values: list[object]) -> Parser:
    rest = tuple(value for value in values if value is not None)
    inner: Parser
    if rest and all(isinstance(value, str) for value in rest):
        inner = _OneOf(_String(), rest)
    elif rest and all(isinstance(value, int) and not isinstance(value, bool) for value in rest):
        inner = _OneOf(_Integer(), rest)
    else:
        return _Json()
    return _Nullable(inner) if len(rest) < len(values) else inner


def _resolve(reference: str, place: _Place) -> object:
    part: object = place.root
    if not reference.startswith("#"):
        raise ValueError(
            f"{place.path} refers to {reference!r}; only references within the schema (#/…) can be followed"
        )
    for name in reference.removeprefix("#").split("/")[1:]:
        name = name.replace("~1", "/").replace("~0", "~")
        if not isinstance(part, Mapping) or name not in part:
            raise ValueError(f"{place.path} refers to {reference!r}, which the schema does not hold")
        part = part[name]
    return part


def _misfit(value: object, where: str, expected: str) -> ValueError:
    return ValueError(f"{where} is {json.dumps(value, ensure_ascii=False)[:80]}, which is not {expected}")


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not allowed in JSON")
