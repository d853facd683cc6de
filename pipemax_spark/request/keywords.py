"""Let functions take the fields of dataclasses as keyword arguments, so that each field is declared once."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import MISSING, Field, fields
from typing import Any, ParamSpec, TypeVar, get_type_hints

_P = ParamSpec("_P")
_T = TypeVar("_T")


def takes_fields(*kinds: type, **types: Any) -> Callable[[Callable[_P, _T]], Callable[_P, _T]]:
    """Return a decorator that replaces a function's ``**`` parameter with the fields of these dataclasses.

    ``help`` and notebooks then show the fields by name, type and default. ``types`` are the types that the function
    takes where they differ from the fields'. A field that holds another of these dataclasses is left out, because that
    dataclass's fields represent it.
    """
    hints = {name: hint for kind in kinds for name, hint in get_type_hints(kind).items()}
    taken = [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=_default(field),
            annotation=types.get(field.name, hints[field.name]),
        )
        for kind in kinds
        for field in fields(kind)
        if hints[field.name] not in kinds
    ]

    return takes(taken)


def _default(field: Field[Any]) -> Any:
    if field.default_factory is not MISSING:
        return field.default_factory()
    return inspect.Parameter.empty if field.default is MISSING else field.default


def takes(parameters: Sequence[inspect.Parameter]) -> Callable[[Callable[_P, _T]], Callable[_P, _T]]:
    """Return a decorator that replaces a function's ``**`` parameter with these parameters in its signature.

    Parameters that the function declares itself stay unchanged.
    """

    def decorate(function: Callable[_P, _T]) -> Callable[_P, _T]:
        signature = inspect.signature(function)
        declared = [
            parameter
            for parameter in signature.parameters.values()
            if parameter.kind is not inspect.Parameter.VAR_KEYWORD
        ]
        names = {parameter.name for parameter in declared}
        others = [parameter for parameter in parameters if parameter.name not in names]
        function.__signature__ = signature.replace(parameters=[*declared, *others])  # type: ignore[attr-defined]
        return function

    return decorate
