"""Follow a JSON schema along a value, to know which arrays are sets and which properties there are."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

_OPTIONS = ("anyOf", "oneOf", "allOf")


@dataclass(frozen=True, slots=True, kw_only=True)
class Schema:
    """A part of a schema, with the whole in which its references are looked up."""

    part: Mapping[str, Any] = field(default_factory=dict)
    root: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, schema: Mapping[str, Any]) -> "Schema":
        """Return a whole schema, whose references are within it (``response_format`` refuses others)."""
        return cls(part=schema, root=schema)

    @property
    def is_set(self) -> bool:
        """Tell whether an array here is a set: the schema, what it refers to or one of its options says so."""
        return any(part.get("uniqueItems") is True for part in self._alternatives())

    def property_names(self) -> list[str]:
        """Return the names of the properties that an object here may have, as the schema lists them."""
        return list(
            dict.fromkeys(name for part in self._alternatives() for name in part.get("properties", {}))
        )

    def below(self, name: str) -> tuple["Schema", ...]:
        """Return the schemas of a property of this name."""
        parts = []
        for part in self._alternatives():
            others = part.get("additionalProperties")
            parts.append(part.get("properties", {}).get(name, others))
        return self._schemas(parts)

    def items(self, place: int) -> tuple["Schema", ...]:
        """Return the schemas of an array's element at this place, from 0."""
        parts = []
        for part in self._alternatives():
            first = part.get("prefixItems", [])
            parts.append(first[place] if place < len(first) else part.get("items"))
        return self._schemas(parts)

    def _schemas(self, parts: list[object]) -> tuple["Schema", ...]:
        return tuple(Schema(part=part, root=self.root) for part in parts if isinstance(part, Mapping))

    def _alternatives(self) -> Iterator[Mapping[str, Any]]:
        """Yield the part, what it refers to, and its options, each once."""
        seen: list[int] = []
        parts: list[object] = [self.part]
        while parts:
            part = parts.pop(0)
            if not isinstance(part, Mapping) or id(part) in seen:
                continue
            seen.append(id(part))
            yield part
            if isinstance(reference := part.get("$ref"), str):
                parts.append(self._resolve(reference))
            for name in _OPTIONS:
                parts += part.get(name, ())

    def _resolve(self, reference: str) -> object:
        part: Any = self.root
        for name in unquote(reference.removeprefix("#")).split("/")[1:]:
            name = name.replace("~1", "/").replace("~0", "~")
            try:
                part = part[int(name)] if isinstance(part, list) else part[name]
            except (LookupError, TypeError, ValueError):
                return None
        return part
