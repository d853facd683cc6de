"""Throw a coin for a row: the same in every attempt, on every machine, in Python and in Spark's SQL.

The coin is made from the seed, the row's identity and, among rows of equal identity, its number, so that each copy
has a coin of its own: one coin for all copies would break the promise. The seed is drawn once, after everything else
is decided, and recorded before the large model is asked for anything.
"""

import hashlib
import secrets

_BITS = 48
"""Of the hash: a double holds them exactly."""


def new_seed() -> str:
    """Draw a seed of 128 bits, as 32 hexadecimal digits."""
    return secrets.token_hex(16)


def coin(seed: str, identity: str, occurrence: int) -> float:
    """Return a number from 0 up to, not including, 1, for the row of this identity and number (from 1)."""
    return _uniform(f"{seed}\0{identity}\0{occurrence}")


def tie_break(seed: str, request: str) -> float:
    """Return the number from 0 to 1 that orders rows of equal score: one for all copies of a request."""
    return _uniform(f"{seed}tie\0{request}\0001")


def coin_sql(seed: str, identity: str, occurrence: str) -> str:
    """Return ``coin`` as a SQL expression of a string and an integer expression, equal to the last bit."""
    return _uniform_sql(f"concat('{seed}', char(0), {identity}, char(0), cast({occurrence} as string))")


def tie_break_sql(seed: str, request: str) -> str:
    """Return ``tie_break`` as a SQL expression of a string expression, equal to the last bit."""
    return _uniform_sql(f"concat('{seed}tie', char(0), {request}, char(0), '1')")


def _uniform(text: str) -> float:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[: _BITS // 8], "big") / 2.0**_BITS


def _uniform_sql(text: str) -> str:
    digits = f"substr(sha2({text}, 256), 1, {_BITS // 4})"
    return f"cast(conv({digits}, 16, 10) as double) / pow(2, {_BITS})"
