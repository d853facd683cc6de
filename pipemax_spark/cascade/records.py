"""Write frozen values as JSON that is byte for byte the same for equal values, and read them again."""

import json
from collections.abc import Mapping
from dataclasses import MISSING, asdict, fields
from typing import Any


def canonical_json(value: Any) -> str:
    """Return a dataclass as one line of JSON with sorted names, and each number in its fewest digits."""
    return canonical_text(asdict(value))


def canonical_text(values: Any) -> str:
    """Return what JSON can hold as one such line."""
    return json.dumps(values, sort_keys=True, separators=(",", ":"), allow_nan=False)


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


def ordinal(number: int) -> str:
    """Return a number above 0 as a place in an order: 1st, 2nd, 3rd, 4th."""
    ending = {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{'th' if number % 100 in (11, 12, 13) else ending}"


def of_reset(what: str, number: int) -> str:
    """Return the sentence that counts a table's draws or ledgers after a reset; empty for the first one."""
    return (
        ""
        if number == 1
        else f" This is the table's {ordinal(number)} {what}: what came before was given up."
    )
