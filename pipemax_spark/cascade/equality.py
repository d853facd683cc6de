"""Say whether the two models' answers to a row differ: one bit, by a rule that is fixed before any label is seen.

Texts (choices, regular expressions, grammars, classes) are equal after Unicode's NFC and without the space around them.
JSON is equal by its values: the order of names does not matter, nor how a number is written; an array that the schema
calls ``uniqueItems`` is a set. Numbers may be a tolerance apart. Thoughts are no part of an answer. An answer that is
missing or cannot be read differs from every other.
"""

import decimal
import json
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from enum import StrEnum
from typing import Any, NoReturn

from pipemax_spark.cascade.json_sets import Schema

_EXACT = decimal.Context(prec=60, traps=[])
"""Differences of numbers, to 60 digits; nothing raises, and what is not a number is not close to anything."""


class Answers(StrEnum):
    """How answers are compared."""

    TEXT = "text"
    CLASSES = "classes"
    """Of classifiers: the most probable class, or of a model with several labels per row the set of them."""
    NUMBER = "number"
    """Of models that score."""
    JSON = "json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Equality:
    """When two answers are the same."""

    answers: Answers
    tolerance: str = "0"
    """How far two numbers may be apart, in decimals: 0.1 is a tenth, and not the float next to it."""
    fields: tuple[str, ...] = ()
    """The properties of a JSON answer that are compared; empty for all."""
    schema: Schema = field(default_factory=Schema)
    """The schema of JSON answers, which says which arrays are sets."""

    def __post_init__(self) -> None:
        try:
            number = Decimal(self.tolerance)
        except decimal.InvalidOperation:
            number = Decimal(-1)
        if not (number.is_finite() and number >= 0):
            raise ValueError(f"agree-tolerance is {self.tolerance!r}; give a number from 0, such as 0.01")
        if number > 0 and self.answers in (Answers.TEXT, Answers.CLASSES):
            raise ValueError(
                "agree-tolerance is for numbers: of a score, or in a JSON schema; these answers are texts, which are "
                "equal or not"
            )
        if self.fields and self.answers is not Answers.JSON:
            raise ValueError("agree-fields is for answers with a JSON schema; these answers have no fields")
        names = self.schema.property_names()
        if unknown := [name for name in self.fields if names and name not in names]:
            raise ValueError(
                f"agree-fields names {unknown[0]!r}, which the schema has not; it has {', '.join(map(repr, names))}"
            )

    def differ(self, small: str | float | None, large: str | float | None) -> bool:
        """Tell whether two answers differ. None is an answer that is missing, or an error."""
        if small is None or large is None:
            return True
        match self.answers:
            case Answers.TEXT:
                return _plain(str(small)) != _plain(str(large))
            case Answers.CLASSES:
                return _classes_differ(json.loads(str(small)), json.loads(str(large)))
            case Answers.NUMBER:
                return not self._are_close(_number(small), _number(large))
            case Answers.JSON:
                return self._json_differs(str(small), str(large))

    def shown(self, answer: str) -> str:
        """Return an answer as people read it."""
        if self.answers is not Answers.CLASSES:
            return answer
        classes = json.loads(answer)
        return str(classes["label"]) if classes["excludes"] else ", ".join(classes["labels"]) or "(none)"

    def _json_differs(self, small: str, large: str) -> bool:
        try:
            one, other = _read(small), _read(large)
            if not self.fields:
                return not self._are_equal(one, other, (self.schema,))
            if not (isinstance(one, dict) and isinstance(other, dict)):
                return True
            return not all(self._property_agrees(one, other, name) for name in self.fields)
        except (ValueError, RecursionError):
            return True

    def _property_agrees(self, one: dict[str, Any], other: dict[str, Any], name: str) -> bool:
        if name not in one or name not in other:
            return name not in one and name not in other
        return self._are_equal(one[name], other[name], self.schema.below(name))

    def _are_equal(self, one: object, other: object, schemas: Sequence[Schema]) -> bool:
        match one, other:
            case bool() | None, _:
                return one is other
            case str(), str():
                return _plain(one) == _plain(other)
            case Decimal(), Decimal():
                return self._are_close(one, other)
            case dict(), dict():
                return one.keys() == other.keys() and all(
                    self._are_equal(part, other[name], _below(schemas, name)) for name, part in one.items()
                )
            case list(), list():
                if any(schema.is_set for schema in schemas):
                    one, other = _as_set(one), _as_set(other)
                return len(one) == len(other) and all(
                    self._are_equal(part, twin, _items(schemas, place))
                    for place, (part, twin) in enumerate(zip(one, other, strict=True))
                )
        return False

    def _are_close(self, one: Decimal, other: Decimal) -> bool:
        if one == other:
            return True
        # A comparison with NaN, which is also the difference of infinities, is false without the context's traps.
        gap = _EXACT.abs(_EXACT.subtract(one, other))
        return gap.is_finite() and gap <= Decimal(self.tolerance)


def _classes_differ(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Compare the likeliest classes, or the sets of the labels, unless both models' classes exclude each other.

    Of a model with several labels per row, probabilities may add up to 1 by chance; hardly ever those of both models.
    """
    name = "label" if one["excludes"] and other["excludes"] else "labels"
    return bool(one[name] != other[name])


def _plain(text: str) -> str:
    return unicodedata.normalize("NFC", text).strip()


def _number(value: str | float) -> Decimal:
    try:
        return Decimal(str(value).strip())
    except decimal.InvalidOperation:
        return Decimal("nan")


def _read(text: str) -> Any:
    return json.loads(text, parse_float=Decimal, parse_int=Decimal, parse_constant=_no_constant)


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not allowed in JSON")


def _as_set(values: Iterable[object]) -> list[object]:
    """Return values without repetitions in an order of their own: numbers by size, so that near ones are paired."""
    by_text = {_canonical(value): value for value in values}
    return sorted(by_text.values(), key=_order)


def _order(value: object) -> tuple[bool, Decimal, str]:
    is_number = isinstance(value, Decimal)
    return not is_number, value if isinstance(value, Decimal) else Decimal(0), _canonical(value)


def _canonical(value: object) -> str:
    """Return a text that is equal for equal values."""
    match value:
        case Decimal():
            return str(value.normalize(_EXACT)) if value else "0"
        case str():
            return json.dumps(_plain(value))
        case list():
            return f"[{','.join(map(_canonical, value))}]"
        case dict():
            return (
                f"{{{','.join(f'{json.dumps(name)}:{_canonical(value[name])}' for name in sorted(value))}}}"
            )
    return json.dumps(value)


def _below(schemas: Iterable[Schema], name: str) -> tuple[Schema, ...]:
    return tuple(part for schema in schemas for part in schema.below(name))


def _items(schemas: Iterable[Schema], place: int) -> tuple[Schema, ...]:
    return tuple(part for schema in schemas for part in schema.items(place))
