"""Find the environment variables from which an endpoint's config reads its keys, and refuse keys that it holds."""

import re
from collections.abc import Mapping
from typing import Any

VARIABLE = re.compile(r"\$\{(\w+)\}")
"""How a header names a variable."""
_SECRET_HEADER = re.compile(r"auth|key|token|secret|cookie|password|signature", re.IGNORECASE)
_SECRET_FIELD = re.compile(r"api_?-?key|secret|password|authorization|credential", re.IGNORECASE)
_SECRET_VALUE = re.compile(r"\b(bearer|basic)\s|\bsk-", re.IGNORECASE)
_BESIDE_A_KEY = re.compile(r"\s*(?:(?:bearer|basic|token|api-?key|key)[\s=:]*)*", re.IGNORECASE)
"""What a header holds besides its keys, such as ``Bearer``."""
_VARIABLE_NAME = re.compile(r"[A-Z_][A-Z0-9_]{0,79}")


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


def checked_headers(headers: dict[str, str]) -> dict[str, str]:
    """Return the headers. ``ValueError`` for a secret that is written down."""
    for name, text in headers.items():
        is_secret = _SECRET_HEADER.search(name) or _SECRET_VALUE.search(text)
        beside = VARIABLE.sub("", text)
        if is_secret and (beside == text or not _BESIDE_A_KEY.fullmatch(beside)):
            raise ValueError(
                f"{name} looks like a key, which would appear in logs and in MLflow; write ${{NAME}} for the "
                "environment variable that holds it"
            )
    return headers


def checked_variable(name: str | None) -> str | None:
    """Return the name. ``ValueError``, without the value, for what is more likely a key than a variable's name."""
    if name is not None and not _VARIABLE_NAME.fullmatch(name):
        raise ValueError(
            "is no name of an environment variable in capitals; give the variable's name, such as OPENAI_API_KEY, and "
            "never the key"
        )
    return name


def secret_field(value: Any) -> str | None:
    """Return the name of a field that looks like a secret, at any depth."""
    for name, inner in value.items() if isinstance(value, dict) else ():
        if _SECRET_FIELD.search(str(name)):
            return str(name)
        if (inner_name := secret_field(inner)) is not None:
            return inner_name
    return None
