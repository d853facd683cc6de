"""Let functions take the fields of a dataclass as keyword arguments, so that each field is declared once."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import MISSING, fields
from typing import Any, ParamSpec, TypeVar, get_type_hints

_P = ParamSpec("_P")
_T = TypeVar("_T")


def takes_fields(kind: type, **types: Any) -> Callable[[Callable[_P, _T]], Callable[_P, _T]]:
    """Return a decorator that replaces a function's ``**`` parameter with the fields of this dataclass.

    ``help`` and notebooks then show the fields by name, type and default. ``types`` are the types that the function
    takes where they differ from the fields'.
    """
    hints = get_type_hints(kind) | types
    taken = [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if field.default is MISSING else field.default,
            annotation=hints[field.name],
        )
        for field in fields(kind)
    ]

    return takes(taken)


def takes(parameters: Sequence[inspect.Parameter]) -> Callable[[Callable[_P, _T]], Callable[_P, _T]]:
    """Return a decorator that replaces a function's ``**`` parameter with these parameters in its signature."""

    def decorate(function: Callable[_P, _T]) -> Callable[_P, _T]:
        signature = inspect.signature(function)
        own = [
            each for each in signature.parameters.values() if each.kind is not inspect.Parameter.VAR_KEYWORD
        ]
        function.__signature__ = signature.replace(parameters=[*own, *parameters])  # type: ignore[attr-defined]
        return function

    return decorate
