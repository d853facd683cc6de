"""Parsers of JSON values, one class for each kind of value: they check a value and return it as pyarrow takes it.

They know Arrow types and nothing of JSON schemas; ``response_format`` builds them from a schema.
"""

import json
import math
import re
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, date, datetime
from decimal import Decimal as DecimalNumber
from typing import Protocol

import pyarrow as pa

_MAX_FLOAT32 = 3.4028234663852886e38


class Parser(Protocol):
    """A part of a compiled schema."""

    @property
    def arrow_type(self) -> pa.DataType: ...

    def convert(self, value: object, where: str) -> object:
        """Return the value as pyarrow takes it for ``arrow_type``.

        ``ValueError`` says what at ``where`` does not fit.
        """


@dataclass(frozen=True, slots=True)
class JsonText:
    """A value that no Spark type holds, kept as JSON text."""

    arrow_type = pa.string()

    def convert(self, value: object, where: str) -> str:
        return json.dumps(value, ensure_ascii=False)


@dataclass(frozen=True, slots=True)
class String:
    """Any string."""

    arrow_type = pa.string()

    def convert(self, value: object, where: str) -> str:
        if not isinstance(value, str):
            raise _mismatch(value, where, "a string")
        return value


@dataclass(frozen=True, slots=True)
class Integer:
    """A whole number of 8, 16, 32 or 64 bits."""

    bits: int = 64

    @property
    def arrow_type(self) -> pa.DataType:
        return {8: pa.int8(), 16: pa.int16(), 32: pa.int32(), 64: pa.int64()}[self.bits]

    def convert(self, value: object, where: str) -> int:
        # JSON schema takes 3.0 as an integer; Python takes True as one. Infinity, from 1e999, fails the comparison.
        if isinstance(value, bool) or not isinstance(value, int | float) or value != value // 1:
            raise _mismatch(value, where, "an integer")
        if not -(2 ** (self.bits - 1)) <= value < 2 ** (self.bits - 1):
            raise _mismatch(value, where, f"an integer of {self.bits} bits")
        return int(value)


@dataclass(frozen=True, slots=True)
class Number:
    """A finite number of 32 or 64 bits."""

    bits: int = 64

    @property
    def arrow_type(self) -> pa.DataType:
        return pa.float64() if self.bits == 64 else pa.float32()

    def convert(self, value: object, where: str) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise _mismatch(value, where, "a number")
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if not math.isfinite(number) or (self.bits == 32 and abs(number) > _MAX_FLOAT32):
            raise _mismatch(value, where, f"a number of {self.bits} bits")
        return number


@dataclass(frozen=True, slots=True)
class Decimal:
    """Digits in a string, whose number a grammar can bound exactly; a JSON number may have any number of digits."""

    precision: int
    scale: int

    @property
    def arrow_type(self) -> pa.DataType:
        return pa.decimal128(self.precision, self.scale)

    @property
    def pattern(self) -> str:
        # An empty alternative, not "?": xgrammar lets digits through after an optional group.
        whole = "0" if self.precision == self.scale else f"[0-9]{{1,{self.precision - self.scale}}}"
        return f"^-?{whole}(\\.[0-9]{{1,{self.scale}}}|)$" if self.scale else f"^-?{whole}$"

    def convert(self, value: object, where: str) -> DecimalNumber:
        if not isinstance(value, str) or not re.fullmatch(self.pattern, value, re.ASCII):
            raise _mismatch(value, where, f"a string with a decimal({self.precision},{self.scale})")
        return DecimalNumber(value)


@dataclass(frozen=True, slots=True)
class Date:
    """A string such as 2026-01-31."""

    arrow_type = pa.date32()

    def convert(self, value: object, where: str) -> date:
        if isinstance(value, str) and len(value) == len("2026-01-31"):
            with suppress(ValueError):
                return date.fromisoformat(value)
        raise _mismatch(value, where, "a date such as 2026-01-31")


@dataclass(frozen=True, slots=True)
class Timestamp:
    """A string such as 2026-01-31T12:00:00Z."""

    arrow_type = pa.timestamp("us", tz="UTC")

    def convert(self, value: object, where: str) -> datetime:
        if isinstance(value, str):
            with suppress(ValueError, OverflowError):
                read = datetime.fromisoformat(value)
                if read.tzinfo is not None:
                    return read.astimezone(UTC)
        raise _mismatch(value, where, "a time with its offset, such as 2026-01-31T12:00:00Z")


@dataclass(frozen=True, slots=True)
class Boolean:
    """True or false."""

    arrow_type = pa.bool_()

    def convert(self, value: object, where: str) -> bool:
        if not isinstance(value, bool):
            raise _mismatch(value, where, "true or false")
        return value


@dataclass(frozen=True, slots=True)
class Nullable:
    """A value or null."""

    inner: Parser

    @property
    def arrow_type(self) -> pa.DataType:
        return self.inner.arrow_type

    def convert(self, value: object, where: str) -> object:
        return None if value is None else self.inner.convert(value, where)


@dataclass(frozen=True, slots=True)
class NotNull:
    """A value whose Arrow field is not nullable."""

    inner: Parser

    @property
    def arrow_type(self) -> pa.DataType:
        return self.inner.arrow_type

    def convert(self, value: object, where: str) -> object:
        return self.inner.convert(value, where)


@dataclass(frozen=True, slots=True)
class OneOf:
    """An enum or const whose values are all of one scalar type."""

    inner: Parser
    allowed: tuple[object, ...]

    @property
    def arrow_type(self) -> pa.DataType:
        return self.inner.arrow_type

    def convert(self, value: object, where: str) -> object:
        converted = self.inner.convert(value, where)
        if converted not in self.allowed:
            raise _mismatch(value, where, f"one of {json.dumps(self.allowed[:20])}")
        return converted


@dataclass(frozen=True, slots=True)
class Array:
    """An array whose elements have one type."""

    items: Parser

    @property
    def arrow_type(self) -> pa.DataType:
        return pa.list_(_field("item", self.items))

    def convert(self, value: object, where: str) -> list[object]:
        if not isinstance(value, list):
            raise _mismatch(value, where, "an array")
        return [self.items.convert(item, f"{where}[{i}]") for i, item in enumerate(value)]


@dataclass(frozen=True, slots=True)
class Map:
    """An object with any properties, whose values have one type."""

    values: Parser

    @property
    def arrow_type(self) -> pa.DataType:
        return pa.map_(pa.string(), _field("value", self.values))

    def convert(self, value: object, where: str) -> list[tuple[str, object]]:
        if not isinstance(value, dict):
            raise _mismatch(value, where, "an object")
        return [(name, self.values.convert(part, f"{where}.{name}")) for name, part in value.items()]


@dataclass(frozen=True, slots=True)
class Struct:
    """An object of named properties; others are dropped."""

    properties: tuple[tuple[str, Parser], ...]
    required: frozenset[str]

    @property
    def arrow_type(self) -> pa.DataType:
        return pa.struct([_field(name, part) for name, part in self.properties])

    def convert(self, value: object, where: str) -> dict[str, object]:
        if not isinstance(value, dict):
            raise _mismatch(value, where, "an object")
        missing = sorted(self.required - value.keys())
        if missing:
            raise ValueError(f"{where} lacks the required property {missing[0]!r}")
        return {
            name: part.convert(value[name], f"{where}.{name}") if name in value else None
            for name, part in self.properties
        }


def _field(name: str, parser: Parser) -> pa.Field:
    return pa.field(name, parser.arrow_type, nullable=not isinstance(parser, NotNull))


def _mismatch(value: object, where: str, expected: str) -> ValueError:
    return ValueError(f"{where} is {json.dumps(value, ensure_ascii=False)[:80]}, which is not {expected}")
