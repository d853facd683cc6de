"""Find the names of the environment variables from which an endpoint's config reads its keys."""

import re
from collections.abc import Mapping
from typing import Any

VARIABLE = re.compile(r"\$\{(\w+)\}")
"""How a header names a variable."""


def secret_variables(values: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of the environment variables that an endpoint's config, as plain values, reads keys from."""
    named = values.get("endpoint")
    addresses = named if isinstance(named, list | tuple) else [named]
    holders = [values, *(one for one in addresses if isinstance(one, Mapping))]
    names: dict[str, None] = {}
    for holder in holders:
        if isinstance(name := holder.get("api_key_env"), str):
            names[name] = None
        headers = holder.get("headers")
        for text in headers.values() if isinstance(headers, Mapping) else ():
            names |= dict.fromkeys(VARIABLE.findall(str(text)))
    return tuple(names)
