"""Keep what is wrong with one row's values that row's error: the one guard around all work on users' text.

A row's text may hold anything: bytes that are no UTF-8, a lone surrogate, a number that no type holds, JSON nested
thousandfold. Whatever reads it raises in its own way. This module knows nothing of what is read.
"""

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import pyarrow as pa

from pipemax.generation import RequestError
from pipemax.wire.rows import ErrorCode

_Value = TypeVar("_Value")
_Made = TypeVar("_Made")
_SHOWN = 80


class RowFaultError(ValueError):
    """One row cannot become a request; carries the error that its error row reports."""

    def __init__(self, code: ErrorCode, message: str) -> None:
        super().__init__(message)
        self.error = RequestError(code=code, message=encodable(message))


def guarded(work: Callable[[_Value], _Made], value: _Value, code: ErrorCode) -> _Made | RequestError:
    """Return what the work makes of a row's value, or the row's error, of ``code`` unless the work names another.

    A value of ``python_values`` that could not be read is an error without any work.
    """
    if isinstance(value, Exception):
        return RequestError(code=code, message=reason(value))
    try:
        return work(value)
    except RowFaultError as fault:
        return fault.error
    except Exception as error:  # the work is pure, so whatever it raises comes from the row's value
        return RequestError(code=code, message=reason(error))


def guarded_all(
    work: Callable[[Any], Any], values: Iterable[Any], code: ErrorCode
) -> tuple[list[Any], list[RequestError | None]]:
    """Return what the work makes of each row's value, null for a row in error, and the rows' errors."""
    outcomes = [guarded(work, value, code) for value in values]
    return (
        [None if isinstance(outcome, RequestError) else outcome for outcome in outcomes],
        [outcome if isinstance(outcome, RequestError) else None for outcome in outcomes],
    )


def reason(error: Exception) -> str:
    """Return what an exception says about a row's value, as a clause that a table can hold."""
    match error:
        case UnicodeDecodeError():
            return f"the text is not UTF-8: {error.reason} at byte {error.start}"
        case RecursionError():
            return "the value is nested too deeply to be read"
    return encodable(str(error) or type(error).__name__)


def python_values(column: pa.Array) -> list[Any]:
    """Return a column as Python values; a value that Python cannot hold is the exception that says why."""
    if column.null_count == len(column):
        return [None] * len(column)
    try:
        values: list[Any] = column.to_pylist()
    except (ValueError, ArithmeticError):
        values = [_value_or_error(value) for value in column]
    return values


def encodable(text: str) -> str:
    """Replace lone surrogates, which neither Arrow nor a file takes, by question marks."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode(errors="replace").decode()
    return text


def shown(value: object) -> str:
    """Return a row's value as an error message shows it."""
    text = encodable(value if isinstance(value, str) else repr(value))
    text = text if len(text) <= _SHOWN else f"{text[: _SHOWN - 1]}…"
    return repr(text) if isinstance(value, str) else text


def _value_or_error(value: pa.Scalar) -> Any:
    try:
        return value.as_py()
    except (ValueError, ArithmeticError) as error:
        return error
