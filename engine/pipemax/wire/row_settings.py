"""Convert what a row says of its own sampling, one value at a time, whoever brings it: a column, a file or a UDF.

Numbers may come as any number or as text. A value is never rounded, cut or guessed: what does not fit exactly is a
``ValueError``. Whether a value is in its range (``top_p`` above 0) is ``pipemax.generation``'s business.
"""

import math
import re
from decimal import Decimal

import pyarrow as pa

from pipemax.wire.row_faults import shown
from pipemax.wire.rows import OVERRIDES_TYPE

_TYPES: dict[str, pa.DataType] = {field.name: field.type for field in OVERRIDES_TYPE}
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d{1,4})?", re.ASCII)
_TRUTHS = {"true": True, "false": False}
_MAX_DIGITS = 400
_EXACT_FLOATS = 2**53
"""Beyond it, neighbouring whole numbers are one float, so a float says no whole number."""


def row_setting(name: str, value: object, *, name_shown: str | None = None) -> object:
    """Return a row's value for a field of ``OVERRIDES_TYPE``; None stays None.

    ``ValueError`` says what does not fit, and calls the field ``name_shown`` if the row does.
    """
    kind = _TYPES[name]
    called = name_shown or name
    if value is None:
        return None
    if isinstance(value, Exception):
        raise ValueError(f"{called} is no text that can be read")
    if pa.types.is_integer(kind):
        return _whole_number(called, value, kind.bit_width)
    if pa.types.is_floating(kind):
        return _number(called, value)
    if pa.types.is_boolean(kind):
        return _truth(called, value)
    if pa.types.is_list(kind):
        is_text = pa.types.is_string(kind.value_type)
        return _texts(called, value) if is_text else _whole_numbers(called, value, kind.value_type.bit_width)
    if not isinstance(value, str):
        raise ValueError(f"{called} is {shown(value)}, not a text")
    return value


def _exact(name: str, value: object, wanted: str) -> int | float | Decimal:
    if isinstance(value, str):
        text = value.strip()
        if len(text) > _MAX_DIGITS or not _NUMBER.fullmatch(text):
            raise ValueError(f"{name} is {shown(value)}, not {wanted}")
        return Decimal(text)
    if isinstance(value, bool) or not isinstance(value, int | float | Decimal) or not math.isfinite(value):
        raise ValueError(f"{name} is {shown(value)}, not {wanted}")
    return value


def _whole_number(name: str, value: object, bits: int) -> int:
    number = _exact(name, value, "a whole number")
    limit = 2 ** (bits - 1)
    if not -limit <= number < limit:
        raise ValueError(f"{name} is {shown(value)}, must be at least {-limit} and below {limit}")
    if number != int(number):
        raise ValueError(f"{name} is {shown(value)}, not a whole number")
    if isinstance(number, float) and abs(number) > _EXACT_FLOATS:
        raise ValueError(f"{name} is {shown(value)}, a float beyond 2**53, which is no exact whole number")
    return int(number)


def _truth(name: str, value: object) -> bool:
    truth = _TRUTHS.get(value.strip().lower()) if isinstance(value, str) else value
    if not isinstance(truth, bool):
        raise ValueError(f"{name} is {shown(value)}, not true or false")
    return truth


def _whole_numbers(name: str, value: object, bits: int) -> list[int]:
    if isinstance(value, list | tuple):
        return [_whole_number(name, number, bits) for number in value if number is not None]
    return [_whole_number(name, value, bits)]


def _number(name: str, value: object) -> float:
    exact = _exact(name, value, "a number")
    try:
        number = float(exact)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"{name} is {shown(value)}, not a number that a double can hold")
    return number


def _texts(name: str, value: object) -> list[str]:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list | tuple) or not all(
        text is None or isinstance(text, str) for text in texts
    ):
        raise ValueError(f"{name} is {shown(value)}, not a text or a list of texts")
    return [text for text in texts if text is not None]
