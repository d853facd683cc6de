"""Find what a JSON schema refers to in the schema itself: nothing is fetched, and no file is read.

``jsonschema`` by itself opens whatever URL a ``$ref`` names, ``file:`` too. A schema may come with a table or a batch
file, so that would let its author read the executors' files and reach what they reach.
"""

from collections.abc import Iterator
from typing import Any

_REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")


def validator_of(schema: Any) -> Any:
    """Return a ``jsonschema`` validator, whose check of a value raises where the schema refers outside of itself."""
    import jsonschema  # imported only for a schema: an engine may run without these two
    from jsonschema_specifications import REGISTRY

    kind = jsonschema.validators.validator_for(schema)
    return kind(schema, format_checker=kind.FORMAT_CHECKER, registry=REGISTRY)


def check_references(schema: Any) -> None:
    """Raise ``ValueError`` for a reference that leads nowhere in the schema."""
    from jsonschema_specifications import REGISTRY
    from referencing.exceptions import Unresolvable
    from referencing.jsonschema import DRAFT202012, specification_with

    named = schema.get("$schema") if isinstance(schema, dict) else None
    kind = specification_with(named if isinstance(named, str) else "", default=DRAFT202012)
    root = kind.create_resource(schema)
    pending, seen = [(root, REGISTRY.with_resource("", root).resolver_with_root(root))], set[int]()
    while pending:
        resource, resolver = pending.pop()
        if id(resource.contents) in seen:
            continue
        seen.add(id(resource.contents))
        for reference in _references(resource.contents):
            try:
                target = resolver.lookup(reference)
            except Unresolvable:
                raise ValueError(
                    f"response_format refers to {reference!r}, which is not in it, and nothing is read from elsewhere: "
                    "put that schema under $defs, and refer to '#/$defs/NAME'"
                ) from None
            pending.append((kind.create_resource(target.contents), target.resolver))
        pending += [(part, resolver.in_subresource(part)) for part in resource.subresources()]


def _references(contents: Any) -> Iterator[str]:
    if isinstance(contents, dict):
        yield from (value for name in _REFERENCES if isinstance(value := contents.get(name), str))
