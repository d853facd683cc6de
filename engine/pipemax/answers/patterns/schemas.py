"""Put the patterns of a JSON schema into plain form, and say which of them a grammar compiler would misread, and where.

xgrammar ignores a ``pattern`` in several places, such as beside ``enum`` or where no ``type`` says string; guidance
reads it in all of them.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any
from urllib.parse import unquote

from pipemax.answers.patterns.plain import Plain, Reading, plain_pattern

_SCHEMAS_BY_NAME = {
    "properties",
    "$defs",
    "definitions",
    "dependentSchemas",
    "dependencies",
    "patternProperties",
}
_SCHEMAS = {
    *(
        "additionalProperties",
        "unevaluatedProperties",
        "propertyNames",
        "items",
        "prefixItems",
        "additionalItems",
    ),
    *(
        "unevaluatedItems",
        "contains",
        "not",
        "if",
        "then",
        "else",
        "allOf",
        "anyOf",
        "oneOf",
        "contentSchema",
    ),
}
_DECIDE_FOR_XGRAMMAR = {"$ref", "enum", "const", "format", "anyOf", "oneOf", "allOf"}
"""Keywords beside which xgrammar ignores a pattern."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A pattern and where it is."""

    path: str
    pattern: str
    by_xgrammar: Reading
    fault: str = ""
    """Why xgrammar does not read it, as the rest of a sentence about it."""

    def __str__(self) -> str:
        return f"the pattern {self.pattern!r} at {self.path or 'its root'}"


def places_of(schema: str) -> list[Place]:
    """Return a schema's patterns. ``ValueError`` names one that no grammar can follow, and its construct."""
    places: list[Place] = []

    def keep(pattern: str, path: str, holder: Mapping[str, Any], keyword: str) -> str:
        try:
            plain = plain_pattern(pattern)
        except ValueError as error:
            raise ValueError(
                f"response_format has the pattern {pattern!r} at {path or 'its root'} with {error}; it cannot be "
                "enforced while generating, so write the pattern without it"
            ) from None
        reading, fault = plain.by_xgrammar, "which needs characters that JSON escapes, or too large a grammar"
        if plain.whole is not None and keyword == "pattern" and not _is_read_by_xgrammar(holder, path):
            reading, fault = Reading.NOTHING, "where xgrammar ignores it"
        places.append(Place(path=path, pattern=pattern, by_xgrammar=reading, fault=fault))
        return pattern

    _rewritten(json.loads(schema), keep)
    return places


@lru_cache(maxsize=64)
def for_guidance(schema: str) -> str:
    """Return the schema with its patterns as llguidance reads them rightly."""
    return _with_patterns(schema, lambda plain: plain.whole)


@lru_cache(maxsize=64)
def for_xgrammar(schema: str) -> str:
    """Return the schema with its patterns as xgrammar reads them rightly, and outlines too."""
    return _with_patterns(schema, lambda plain: plain.for_xgrammar)


@lru_cache(maxsize=64)
def for_python(schema: str) -> str:
    """Return the schema with its patterns as Python's ``re.search`` reads them rightly."""
    return _with_patterns(schema, lambda plain: plain.searched)


def _with_patterns(schema: str, form: Callable[[Plain], str | None]) -> str:
    has_any = False

    def write(pattern: str, _path: str, _holder: Mapping[str, Any], keyword: str) -> str | None:
        nonlocal has_any
        has_any = True
        written = form(plain_pattern(pattern))
        return "" if written is None and keyword == "patternProperties" else written

    rewritten = _rewritten(json.loads(schema), write)
    return json.dumps(rewritten) if has_any else schema


def _is_read_by_xgrammar(holder: Mapping[str, Any], path: str) -> bool:
    if _DECIDE_FOR_XGRAMMAR & holder.keys():
        return False
    kinds = holder.get("type", "string" if path.endswith("propertyNames") else None)
    return "propertyNames/" not in path and "string" in (kinds if isinstance(kinds, list) else [kinds])


_Write = Callable[[str, str, Mapping[str, Any], str], str | None]


def _rewritten(schema: Any, write: _Write) -> Any:
    """Return the schema with each pattern as ``write`` has it, or without the keyword where that is None."""
    referred = set(_references(schema))

    def of_any(part: Any, path: str) -> Any:
        if isinstance(part, list):
            return [of_any(element, f"{path}/{number}") for number, element in enumerate(part)]
        return of_schema(part, path) if isinstance(part, dict) else part

    def of_schema(part: dict[str, Any], path: str) -> dict[str, Any]:
        made: dict[str, Any] = {}
        for name, value in part.items():
            below = f"{path}/{name}" if path else name
            if name == "pattern" and isinstance(value, str):
                if (pattern := write(value, path, part, name)) is not None:
                    made[name] = pattern
            elif name == "patternProperties" and isinstance(value, dict):
                made[name] = {
                    write(key, below, part, name): of_any(subschema, f"{below}/{key}")
                    for key, subschema in value.items()
                }
            elif name in _SCHEMAS_BY_NAME and isinstance(value, dict):
                made[name] = {key: of_any(subschema, f"{below}/{key}") for key, subschema in value.items()}
            else:
                made[name] = of_any(value, below) if name in _SCHEMAS or name in referred else value
        return made

    return of_any(schema, "")


def _references(schema: Any) -> Iterator[str]:
    """Yield the names on the way to what is referred to, which may be in a place of the user's own."""
    if isinstance(schema, list):
        for element in schema:
            yield from _references(element)
    elif isinstance(schema, dict):
        for name, part in schema.items():
            if name == "$ref" and isinstance(part, str):
                yield from unquote(part).replace("~1", "/").replace("~0", "~").split("/")[1:]
            yield from _references(part)
