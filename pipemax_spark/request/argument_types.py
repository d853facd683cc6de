"""Declare and check the arguments of the functions that users call, so that a wrong one is told by its own name.

A function takes fields of dataclasses as keyword arguments, so that each field is declared once. Its signature says
which types its arguments may have. What users also give is taken: paths for texts that are
paths, numbers of numpy, and numbers and booleans for the options of Spark's readers.
"""

import difflib
import inspect
import os
import types
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, fields
from datetime import timedelta
from functools import wraps
from numbers import Integral, Real
from typing import Any, ParamSpec, TypeVar, Union, get_args, get_origin, get_type_hints

from pipemax.removed import removed_argument
from pipemax_spark.errors import JobError

_P = ParamSpec("_P")
_T = TypeVar("_T")
_PATHS = frozenset(
    {
        "input",
        "output",
        "model",
        "engine_python",
        "log_dir",
        "work_dir",
        "checkpoint",
        "batch_output",
        "summary",
        "page",
    }
)
_SPARKS: Mapping[str, tuple[str, str]] = {
    "df": ("mapInArrow", "a Spark DataFrame"),
    "spark": ("createDataFrame", "a SparkSession"),
}
"""Arguments of Spark's own types, each with a method of that type, which the classes of Spark Connect have too."""
_WORDS: Mapping[Any, str] = {
    bool: "True or False",
    int: "a whole number",
    float: "a number",
    str: "a text",
    timedelta: "a timedelta",
    Sequence: "a list of texts",
    tuple: "a list of texts",
    Mapping: "a dict",
}


def takes_fields(
    *kinds: type, without: Collection[str] = (), **types: Any
) -> Callable[[Callable[_P, _T]], Callable[_P, _T]]:
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
            annotation=types.get(field.name, _taken(hints[field.name])),
        )
        for kind in kinds
        for field in fields(kind)
        if hints[field.name] not in kinds and field.name not in without
    ]
    return takes(taken)


def _taken(hint: Any) -> Any:
    """Return the type that a function takes for a field: any list does for a tuple."""
    return Sequence[get_args(hint)[0]] if get_origin(hint) is tuple else hint  # type: ignore[misc]  # made at run time


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


def checks_arguments(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Return the function with a check of its arguments by its signature.

    It raises ``TypeError`` for an argument that the function does not have, and ``JobError`` for a value of a wrong
    type.
    """

    @wraps(function)
    def checked(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        parameters = list(inspect.signature(checked).parameters.values())
        places = [
            parameter.name for parameter in parameters if parameter.kind is parameter.POSITIONAL_OR_KEYWORD
        ]
        for name, value in zip(places, args, strict=False):
            _checked(name, value, None)
        return function(*args, **checked_arguments(checked, kwargs))

    return checked


def checked_arguments(function: Callable[..., object], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return these arguments of the function, converted to the types that it declares."""
    parameters = inspect.signature(function).parameters
    for name in values:
        if name not in parameters:
            called = f"{getattr(function, '__name__', 'it')}()"
            if (replacement := removed_argument(name)) is not None:
                raise TypeError(f"{called} does not take {name!r}: {replacement}")
            if name == "cascade":
                raise TypeError(
                    f"{called} does not take 'cascade': its promise is about all rows of a table; use "
                    "annotate_table(…, cascade=…)"
                )
            raise TypeError(
                f"{called} got an unexpected keyword argument {name!r}.{did_you_mean(name, parameters)}"
            )
    return {name: _checked(name, value, parameters[name].annotation) for name, value in values.items()}


def checked_value(name: str, value: Any, hint: Any) -> Any:
    """Return the value as one of this type. Raise ``JobError`` if it is of another."""
    if isinstance(hint, str) or value is None:  # what is declared as text has a check of its own
        return value
    if name in _PATHS and isinstance(value, os.PathLike):
        return os.fspath(value)
    kinds = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    if not any(_fits(value, kind) for kind in kinds):
        raise JobError(f"{name} is {_shown(value)}; give {_wanted(name, value, kinds)}")
    if isinstance(value, Integral | Real) and not isinstance(value, bool):
        return _plain(value)
    if get_origin(hint) is Sequence and get_args(hint) == (int,):
        return [_plain(number) for number in value]
    if isinstance(value, Mapping) and get_args(hint) == (str, str):
        return {key: _option(f"{name}[{key!r}]", part) for key, part in value.items()}
    return value


def _plain(number: Any) -> int | float:
    """Return numpy's number as Python's, which JSON knows."""
    return int(number) if isinstance(number, Integral) else float(number)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return `` Did you mean 'x'?`` with the known name that is most like this one, or nothing."""
    plain = {word.replace("-", "_").lower(): word for word in known}
    close = difflib.get_close_matches(name.replace("-", "_").lower(), plain, n=1)
    return f" Did you mean {plain[close[0]]!r}?" if close else ""


def _checked(name: str, value: Any, hint: Any) -> Any:
    if name in _SPARKS:
        method, wanted = _SPARKS[name]
        if not hasattr(value, method):
            way = f", such as spark.createDataFrame({name})" if type(value).__name__ == "DataFrame" else ""
            raise JobError(f"{name} is {_shown(value)}; give {wanted}{way}")
        return value
    return checked_value(name, value, hint)


def _fits(value: Any, kind: Any) -> bool:
    origin = get_origin(kind) or kind
    if origin in (Sequence, tuple):
        is_list = isinstance(value, Sequence) and not isinstance(value, str)
        return is_list and all(any(_fits(element, kind) for kind in _of_elements(kind)) for element in value)
    if origin is int:
        return isinstance(value, Integral) and not isinstance(value, bool)
    if origin is float:
        return isinstance(value, Real) and not isinstance(value, bool)
    return origin is Any or (isinstance(origin, type) and isinstance(value, origin))


def _of_elements(kind: Any) -> tuple[Any, ...]:
    """Return the types that the elements of a sequence's type may have."""
    element = get_args(kind)[0]
    return get_args(element) or (element,)


def _option(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str | Integral | Real):
        return str(value)
    raise JobError(f"{name} is {_shown(value)}; give a text")


def _shown(value: Any) -> str:
    if isinstance(value, str):
        return f"the text {value[:80]!r}"
    if isinstance(value, bool | Integral | Real):
        return repr(value)
    kind = value.__name__ if isinstance(value, type) else type(value).__name__
    if isinstance(value, type):
        return f"the class {kind}"
    return f"{'an' if kind[0] in 'AEIOUaeiou' else 'a'} {kind}"


def _wanted(name: str, value: Any, kinds: Sequence[Any]) -> str:
    if name == "input" and type(value).__name__ == "DataFrame":
        return "the name of a table or a path; annotate() takes a DataFrame"
    if name == "input_option":
        return "a dict, such as {'sep': ';'}"
    if name == "expect_rows":
        return "a pair of numbers, or a text such as '1000:2000000'"
    words = [
        "a list of whole numbers" if get_args(kind) == (int,) else _WORDS.get(get_origin(kind) or kind)
        for kind in kinds
    ]
    return " or ".join(dict.fromkeys(word for word in words if word is not None))
