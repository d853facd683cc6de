"""Keep the specs of a table's annotations among its properties, which show how each of its rows was annotated.

A spec is replaced once a run of another one has begun to put its rows in the place of the spec's rows. The entry of a
replaced spec stays for the rows that are left of it, and names the spec that replaces it.
"""

import json
from collections.abc import Mapping
from typing import Any

SPEC_PROPERTY = "pipemax.spec."


def spec_texts(properties: Mapping[str, str]) -> dict[str, str]:
    """Return spec_hash → the text that ``spec_property`` stored, of specs that are not replaced, the latest last."""
    entries = {key: entry for key, entry in _entries(properties).items() if "replaced_by" not in entry}
    return {
        spec_hash: entry["spec"]
        for spec_hash, entry in sorted(entries.items(), key=lambda item: str(item[1]["since"]))
    }


def spec_property(spec_hash: str, spec_text: str, since: str) -> dict[str, str]:
    """Return the property that keeps a spec; ``since``, the run that brought it, orders the specs."""
    return {f"{SPEC_PROPERTY}{spec_hash}": json.dumps({"since": since, "spec": spec_text})}


def spec_since(properties: Mapping[str, str], spec_hash: str) -> str | None:
    """Return the run that brought the spec, or that brought it back after it was replaced."""
    entry = _entries(properties).get(spec_hash)
    return None if entry is None else str(entry["since"])


def is_replacing(properties: Mapping[str, str], spec_hash: str) -> bool:
    """Tell whether rows of this spec have begun to replace those of others."""
    return any(entry.get("replaced_by") == spec_hash for entry in _entries(properties).values())


def replaced_by(properties: Mapping[str, str], spec_hash: str) -> dict[str, str]:
    """Return the properties to set when rows of this spec begin to replace those of all others; none if they have."""
    return {
        f"{SPEC_PROPERTY}{other}": json.dumps({**entry, "replaced_by": spec_hash})
        for other, entry in _entries(properties).items()
        if other != spec_hash and entry.get("replaced_by") != spec_hash
    }


def _entries(properties: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    return {
        name.removeprefix(SPEC_PROPERTY): json.loads(value)
        for name, value in properties.items()
        if name.startswith(SPEC_PROPERTY)
    }
