"""Keep the specs of a table's annotations among its properties, which show how each of its rows was annotated."""

import json
from collections.abc import Mapping

SPEC_PROPERTY = "pipemax.spec."


def spec_texts(properties: Mapping[str, str]) -> dict[str, str]:
    """Return spec_hash → the text that ``spec_property`` stored, the latest last."""
    entries = {
        name.removeprefix(SPEC_PROPERTY): json.loads(value)
        for name, value in properties.items()
        if name.startswith(SPEC_PROPERTY)
    }
    return {
        spec_hash: entry["spec"]
        for spec_hash, entry in sorted(entries.items(), key=lambda item: str(item[1]["since"]))
    }


def spec_property(spec_hash: str, spec_text: str, since: str) -> dict[str, str]:
    """Return the property that keeps a spec; ``since`` orders the specs."""
    return {f"{SPEC_PROPERTY}{spec_hash}": json.dumps({"since": since, "spec": spec_text})}
