r"""Sets of characters, as sorted ranges of code points, and those that ECMA-262 names: ``\d``, ``\s``, ``\p{…}``."""

import re
from collections.abc import Iterable
from functools import lru_cache

Ranges = tuple[tuple[int, int], ...]
"""First and last code point of each range, sorted, without overlap."""

LAST = 0x10FFFF
SURROGATES: Ranges = ((0xD800, 0xDFFF),)
ANY: Ranges = ((0, LAST),)
DIGITS: Ranges = ((0x30, 0x39),)
WORD: Ranges = ((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A))
SPACE: Ranges = (
    *((0x09, 0x0D), (0x20, 0x20), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A)),
    *((0x2028, 0x2029), (0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF)),
)
LINE_ENDS: Ranges = ((0x0A, 0x0A), (0x0D, 0x0D), (0x2028, 0x2029))
NEVER_GENERATED: Ranges = ((0x00, 0x00), *SURROGATES)
"""No text holds half of a surrogate pair. U+0000 is left out, because llguidance takes a set of all control characters
for one with quotes and backslashes, and vLLM refuses it in a regular expression."""
ESCAPED_IN_JSON: Ranges = ((0x00, 0x1F), (0x22, 0x22), (0x5C, 0x5C))
"""Characters that a JSON text holds as escapes only."""

_PROPERTY = re.compile(r"\w+(=\w+)?", re.ASCII)


def union(parts: Iterable[tuple[int, int]]) -> Ranges:
    """Return the characters of all ranges, which may overlap."""
    merged: list[tuple[int, int]] = []
    for first, last in sorted(parts):
        if merged and first <= merged[-1][1] + 1:
            merged[-1] = merged[-1][0], max(last, merged[-1][1])
        else:
            merged.append((first, last))
    return tuple(merged)


def without(ranges: Ranges) -> Ranges:
    """Return all other characters."""
    others, start = [], 0
    for first, last in ranges:
        if start < first:
            others.append((start, first - 1))
        start = last + 1
    return (*others, (start, LAST)) if start <= LAST else tuple(others)


def common(one: Ranges, other: Ranges) -> Ranges:
    """Return the characters that both have."""
    return without(union((*without(one), *without(other))))


@lru_cache(maxsize=64)
def property_of(name: str) -> Ranges:
    r"""Return the characters of ``\p{name}``. ``ValueError`` if Unicode has no such property."""
    import regex  # imported only for a property: it knows Unicode's

    if not _PROPERTY.fullmatch(name):
        raise ValueError(name)
    try:
        runs = regex.compile(f"\\p{{{name}}}+")
    except regex.error as error:
        raise ValueError(name) from error
    return union((ord(run[0][0]), ord(run[0][-1])) for run in runs.finditer(_all_characters()))


def _all_characters() -> str:
    return "".join(map(chr, range(LAST + 1)))
