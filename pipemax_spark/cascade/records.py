"""Write frozen values as JSON that is byte for byte the same for equal values, and read them again."""

import json
from collections.abc import Mapping
from dataclasses import MISSING, asdict, fields
from typing import Any


def canonical_json(value: Any) -> str:
    """Return a dataclass as one line of JSON with sorted names, and each number in its fewest digits."""
    return json.dumps(asdict(value), sort_keys=True, separators=(",", ":"), allow_nan=False)


def read_fields(kind: type[Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a dataclass's fields. ``ValueError`` names the field that is unknown or missing."""
    if unknown := sorted(values.keys() - {field.name for field in fields(kind)}):
        raise ValueError(f"a record of {kind.__name__} has the unknown field {unknown[0]!r}")
    required = {field.name for field in fields(kind) if field.default is MISSING}
    if missing := sorted(required - values.keys()):
        raise ValueError(f"a record of {kind.__name__} lacks the field {missing[0]!r}")
    return dict(values)


def percent(share: float) -> str:
    """Return a share in percent, with up to four digits."""
    return f"{100 * share:.4g} %"
