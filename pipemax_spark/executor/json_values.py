"""Parsers of JSON values: each checks a value and returns it as pyarrow takes it.

They know Arrow types and nothing of JSON schemas; ``response_format`` builds them from a schema.
"""

import json
import math
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import pyarrow as pa

_MAX_FLOAT32 = 3.4028234663852886e38
_INTEGERS = {8: pa.int8(), 16: pa.int16(), 32: pa.int32(), 64: pa.int64()}


@dataclass(frozen=True, slots=True)
class Parser:
    """A part of a compiled schema."""

    arrow_type: pa.DataType
    convert: Callable[[Any, str], object]
    """Returns a value as pyarrow takes it; ``ValueError`` says what at the named place does not fit."""
    takes_null: bool = False
    is_nullable: bool = True
    """Whether the Arrow field that holds it is nullable."""


def _json_text(value: object, place: str) -> str:
    return json.dumps(value, ensure_ascii=False)


def _string(value: object, place: str) -> str:
    if not isinstance(value, str):
        raise _mismatch(value, place, "a string")
    return value


def _boolean(value: object, place: str) -> bool:
    if not isinstance(value, bool):
        raise _mismatch(value, place, "true or false")
    return value


def _date(value: object, place: str) -> date:
    if isinstance(value, str) and len(value) == len("2026-01-31"):
        with suppress(ValueError):
            return date.fromisoformat(value)
    raise _mismatch(value, place, "a date such as 2026-01-31")


def _timestamp(value: object, place: str) -> datetime:
    if isinstance(value, str):
        with suppress(ValueError, OverflowError):
            time = datetime.fromisoformat(value)
            if time.tzinfo is not None:
                return time.astimezone(UTC)
    raise _mismatch(value, place, "a time with its offset, such as 2026-01-31T12:00:00Z")


JSON_TEXT = Parser(pa.string(), _json_text, takes_null=True)
"""Of a value that no Spark type holds, which is kept as JSON text."""
STRING = Parser(pa.string(), _string)
BOOLEAN = Parser(pa.bool_(), _boolean)
DATE = Parser(pa.date32(), _date)
TIMESTAMP = Parser(pa.timestamp("us", tz="UTC"), _timestamp)


def integer(bits: int = 64) -> Parser:
    """Return the parser of whole numbers of 8, 16, 32 or 64 bits."""

    def convert(value: object, place: str) -> int:
        # JSON schema takes 3.0 as an integer; Python takes True as one. Infinity, from 1e999, fails the comparison.
        if isinstance(value, bool) or not isinstance(value, int | float) or value != value // 1:
            raise _mismatch(value, place, "an integer")
        if not -(2 ** (bits - 1)) <= value < 2 ** (bits - 1):
            raise _mismatch(value, place, f"an integer of {bits} bits")
        return int(value)

    return Parser(_INTEGERS[bits], convert)


def number(bits: int = 64) -> Parser:
    """Return the parser of finite numbers of 32 or 64 bits."""

    def convert(value: object, place: str) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise _mismatch(value, place, "a number")
        try:
            converted = float(value)
        except OverflowError:
            converted = math.inf
        if not math.isfinite(converted) or (bits == 32 and abs(converted) > _MAX_FLOAT32):
            raise _mismatch(value, place, f"a number of {bits} bits")
        return converted

    return Parser(pa.float64() if bits == 64 else pa.float32(), convert)


def decimal(precision: int, scale: int) -> Parser:
    """Return the parser of digits in a string."""
    pattern = decimal_pattern(precision, scale)

    def convert(value: object, place: str) -> Decimal:
        if not isinstance(value, str) or not re.fullmatch(pattern, value, re.ASCII):
            raise _mismatch(value, place, f"a string with a decimal({precision},{scale})")
        return Decimal(value)

    return Parser(pa.decimal128(precision, scale), convert)


def decimal_pattern(precision: int, scale: int) -> str:
    """Return the pattern of a decimal's digits in a string, which a grammar can bound, as it cannot a JSON number's."""
    # An empty alternative, not "?": xgrammar lets digits through after an optional group.
    whole = "0" if precision == scale else f"[0-9]{{1,{precision - scale}}}"
    return f"^-?{whole}(\\.[0-9]{{1,{scale}}}|)$" if scale else f"^-?{whole}$"


def or_null(parser: Parser) -> Parser:
    """Return the parser of a value or null."""
    return replace(
        parser,
        convert=lambda value, place: None if value is None else parser.convert(value, place),
        takes_null=True,
        is_nullable=True,
    )


def one_of(parser: Parser, allowed: tuple[object, ...]) -> Parser:
    """Return the parser of an enum or const whose values are all of one scalar type."""

    def convert(value: object, place: str) -> object:
        converted = parser.convert(value, place)
        if converted not in allowed:
            raise _mismatch(value, place, f"one of {json.dumps(allowed[:20])}")
        return converted

    return replace(parser, convert=convert)


def array(items: Parser) -> Parser:
    """Return the parser of arrays whose elements have one type."""

    def convert(value: object, place: str) -> list[object]:
        if not isinstance(value, list):
            raise _mismatch(value, place, "an array")
        return [items.convert(item, f"{place}[{i}]") for i, item in enumerate(value)]

    return Parser(pa.list_(_field("item", items)), convert)


def map_of(values: Parser) -> Parser:
    """Return the parser of objects with any properties, whose values have one type."""

    def convert(value: object, place: str) -> list[tuple[str, object]]:
        if not isinstance(value, dict):
            raise _mismatch(value, place, "an object")
        return [(name, values.convert(part, f"{place}.{name}")) for name, part in value.items()]

    return Parser(pa.map_(pa.string(), _field("value", values)), convert)


def struct(properties: Mapping[str, Parser], required: frozenset[str]) -> Parser:
    """Return the parser of objects of named properties; others are dropped."""

    def convert(value: object, place: str) -> dict[str, object]:
        if not isinstance(value, dict):
            raise _mismatch(value, place, "an object")
        missing = sorted(required - value.keys())
        if missing:
            raise ValueError(f"{place} lacks the required property {missing[0]!r}")
        return {
            name: part.convert(value[name], f"{place}.{name}") if name in value else None
            for name, part in properties.items()
        }

    return Parser(pa.struct([_field(name, part) for name, part in properties.items()]), convert)


def _field(name: str, parser: Parser) -> pa.Field:
    return pa.field(name, parser.arrow_type, nullable=parser.is_nullable)


def _mismatch(value: object, place: str, expected: str) -> ValueError:
    return ValueError(f"{place} is {json.dumps(value, ensure_ascii=False)[:80]}, which is not {expected}")
