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
| integer with x-spark-type: tinyint, smallint or int | that |
| number with x-spark-type: float | float |
| string with x-spark-type: date, timestamp or decimal(p,s) | that |
| anything else (other unions, mixed enums, tuples, free objects, recursion) | string that holds the value's JSON |

``x-spark-type`` is not a JSON schema keyword: the translation of a Spark type writes it, and this module reads it. A
Spark field is nullable, because properties may be left out, unless its schema says ``x-spark-nullable: false``. Parsing
checks types, enums and consts, required properties and ranges of types. It does not check bounds, patterns, lengths and
formats, which the engine enforces while it generates. Properties that the schema does not name are dropped here and
stay in ``annotation.text``.

This module needs only pyarrow, because it runs in the tasks. It does not decide whether a schema is valid: the
preflight does, on the engine's side, which has ``jsonschema``.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NoReturn
from urllib.parse import unquote

from pipemax.wire import encodable
from pipemax_spark.executor.json_values import (
    BOOLEAN,
    DATE,
    JSON_TEXT,
    STRING,
    TIMESTAMP,
    Parser,
    array,
    decimal,
    integer,
    map_of,
    number,
    one_of,
    or_null,
    struct,
)

SPARK_TYPE = "x-spark-type"
NULLABLE = "x-spark-nullable"
SPARK_TYPES: dict[str, tuple[str, Parser]] = {
    "tinyint": ("integer", integer(8)),
    "smallint": ("integer", integer(16)),
    "int": ("integer", integer(32)),
    "float": ("number", number(32)),
    "date": ("string", DATE),
    "timestamp": ("string", TIMESTAMP),
}
"""Value of ``x-spark-type`` (other than decimal(p,s)) → its JSON type and parser."""
_SCALARS: Mapping[str, Parser] = {
    "string": STRING,
    "integer": integer(),
    "number": number(),
    "boolean": BOOLEAN,
}
_OTHER_REFERENCES = ("$dynamicRef", "$recursiveRef")
_VALUES = ("enum", "const", "default", "examples")
"""Keywords that hold values, not schemas."""
_TOO_DEEP = "the output is JSON nested too deeply to be parsed"
_DECIMAL = re.compile(r"decimal\((\d+), ?(\d+)\)")


def load_schema(text: str) -> dict[str, Any]:
    """Read a schema from its text. Raise ``ValueError`` if the text cannot be one."""
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"response-format is not JSON: {error}") from error
    if not isinstance(schema, dict):
        raise ValueError(
            f"response-format must be a JSON object that holds a schema, got {json.dumps(schema)[:80]}"
        )
    return schema


def compile_schema(schema: Mapping[str, Any]) -> Parser:
    """Return the parser for a schema. Raise ``ValueError`` for a schema whose values no table can hold."""
    try:
        _check_references(schema)
        return _compile(schema, _Place(root=schema, path="response-format"))
    except RecursionError:
        raise ValueError("response-format is nested too deeply") from None


def parse(text: str, parser: Parser) -> object:
    """Return the value in an output's text. ``ValueError`` says what does not fit."""
    try:
        value = json.loads(text, parse_constant=_no_constant)
    except ValueError as error:
        raise ValueError(f"the output is not JSON ({error}); did max_tokens cut it off?") from error
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    try:
        return parser.convert(_storable(value) if "\\u" in text else value, "output")
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None


def _storable(value: object) -> object:
    """Return a value without the lone surrogates that escapes of half a pair leave, which no table can hold."""
    match value:
        case str():
            return encodable(value)
        case list():
            return [_storable(element) for element in value]
        case dict():
            parts = {encodable(name): _storable(part) for name, part in value.items()}
            if len(parts) < len(value):
                raise ValueError(
                    "two names of the output differ only in lone surrogates, which no table can hold"
                )
            return parts
    return value


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
        return JSON_TEXT  # true and false are schemas too
    if (reference := schema.get("$ref")) is not None:
        if reference in place.following:
            return JSON_TEXT
        target = _resolve(reference, place)
        return _compile(target, replace(place, following=place.following | {reference}))
    if NULLABLE in schema and schema[NULLABLE] is not True:
        parser = _compile({**schema, NULLABLE: True}, place)
        if parser.takes_null:
            raise ValueError(f"{place.path} may be null, so {NULLABLE} cannot be false")
        return replace(parser, is_nullable=False)
    options = schema.get("anyOf") or schema.get("oneOf") or schema.get("allOf")
    if options is not None and "type" not in schema:
        return _compile_union(options, place)
    if "enum" in schema or "const" in schema:
        return _compile_enum(schema.get("enum", [schema.get("const")]), place)
    kinds = schema.get("type")
    if isinstance(kinds, list):
        rest = [kind for kind in kinds if kind != "null"]
        if len(rest) != 1:
            return JSON_TEXT
        inner = _compile({**schema, "type": rest[0]}, place)
        return or_null(inner) if len(rest) < len(kinds) else inner
    if (spark_type := schema.get(SPARK_TYPE)) is not None:
        return _compile_spark_type(spark_type, kinds, place)
    match kinds:
        case "array" if isinstance(schema.get("items"), Mapping) and "prefixItems" not in schema:
            return array(_compile(schema["items"], place.below("[]")))
        case "object":
            return _compile_object(schema, place)
        case str():
            return _SCALARS.get(kinds, JSON_TEXT)
        case _:
            return JSON_TEXT


def _check_references(schema: object) -> None:
    """Raise ``ValueError`` for a reference by anchor or address, which the engine may follow otherwise."""
    if isinstance(schema, list):
        for element in schema:
            _check_references(element)
    if not isinstance(schema, Mapping):
        return
    for name, part in schema.items():
        if name in ("$ref", *_OTHER_REFERENCES) and isinstance(part, str):
            if name in _OTHER_REFERENCES or not (part == "#" or part.startswith("#/")):
                raise ValueError(
                    f"response-format has the {name} {part!r}; only references by path within the schema (#/…) can be "
                    "followed, neither anchors nor addresses; write the path"
                )
        elif name not in _VALUES:
            _check_references(part)


def _compile_object(schema: Mapping[str, Any], place: _Place) -> Parser:
    properties = schema.get("properties") or {}
    others = schema.get("additionalProperties")
    if not properties:
        if isinstance(others, Mapping) and others:
            return map_of(_compile(others, place.below(".*")))
        return JSON_TEXT
    by_lower: dict[str, str] = {}
    for name in properties:
        _check_storable(name, place)
        if (other := by_lower.setdefault(name.lower(), name)) != name:
            raise ValueError(
                f"{place.path} has the properties {other!r} and {name!r}, which differ only in case: no table can "
                "hold both; rename one"
            )
    parts = {name: _compile(part, place.below(f".{name}")) for name, part in properties.items()}
    required = frozenset(schema.get("required", ())) & properties.keys()
    for name, part in parts.items():
        if not part.is_nullable and name not in required:
            raise ValueError(
                f"{place.path}.{name} is not nullable, but not required either; list it in 'required'"
            )
    return struct(parts, required)


def _compile_spark_type(name: object, kind: object, place: _Place) -> Parser:
    expected: str
    parser: Parser
    if match := _DECIMAL.fullmatch(str(name)):
        precision, scale = int(match[1]), int(match[2])
        if not 1 <= precision <= 38 or scale > precision:
            raise ValueError(
                f"{place.path} has the {SPARK_TYPE} {name!r}; it may have 1 to 38 digits in total"
            )
        expected, parser = "string", decimal(precision, scale)
    elif isinstance(name, str) and name in SPARK_TYPES:
        expected, parser = SPARK_TYPES[name]
    else:
        raise ValueError(
            f"{place.path} has the {SPARK_TYPE} {name!r}; it may be {', '.join(SPARK_TYPES)} or decimal(p,s)"
        )
    if kind != expected:
        raise ValueError(f"{place.path} has the {SPARK_TYPE} {name!r}, which goes with the type {expected!r}")
    return parser


def _compile_union(options: list[object], place: _Place) -> Parser:
    rest = [option for option in options if option != {"type": "null"}]
    if len(rest) != 1:
        return JSON_TEXT
    inner = _compile(rest[0], place)
    return or_null(inner) if len(rest) < len(options) else inner


def _check_storable(text: str, place: _Place) -> None:
    if encodable(text) != text:
        raise ValueError(
            f"{place.path} has {text!a}, which holds a lone surrogate: no table can hold it; leave it out"
        )


def _compile_enum(values: list[object], place: _Place) -> Parser:
    for value in values:
        if isinstance(value, str):
            _check_storable(value, place)
    rest = tuple(value for value in values if value is not None)
    inner: Parser
    if rest and all(isinstance(value, str) for value in rest):
        inner = one_of(STRING, rest)
    elif rest and all(isinstance(value, int) and not isinstance(value, bool) for value in rest):
        inner = one_of(integer(), rest)
    else:
        return JSON_TEXT
    return or_null(inner) if len(rest) < len(values) else inner


def _resolve(reference: str, place: _Place) -> object:
    part: object = place.root
    for name in unquote(reference.removeprefix("#")).split("/")[1:]:
        name = name.replace("~1", "/").replace("~0", "~")
        if isinstance(part, list) and name.isdecimal() and int(name) < len(part):
            part = part[int(name)]
            continue
        if not isinstance(part, Mapping) or name not in part:
            raise ValueError(f"{place.path} refers to {reference!r}, which the schema does not hold")
        part = part[name]
    return part


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not allowed in JSON")
