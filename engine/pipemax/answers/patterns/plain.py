"""Write a pattern in the few constructs that Python and the grammar compilers read alike, and say how far they go.

These constructs are classes of characters that are written out, groups, alternatives and repetitions. A JSON schema's
pattern may be found anywhere in the text. For grammars it is written for the whole text, as xgrammar takes it anyway.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache

from pipemax.answers.patterns.characters import ESCAPED_IN_JSON, NEVER_GENERATED, Ranges, common, without
from pipemax.answers.patterns.ecma import ANYTHING, Anchor, Characters, Choice, Node, Repeat, Sequence, parse

_MATCHES_NOTHING = "no text that it could match (half of a surrogate pair, U+0000 or an empty class)"
_SPECIAL = frozenset(r"\^$.*+?()[]{}|-")
_LINE_ENDS = {0x0A: r"\n", 0x0D: r"\r"}
_MARKS = (ord("-"), ord("^"))
_MOST_OPTIONS = 64
_MOST_RANGES = 20_000
"""Of a pattern whose repetitions are written out, as xgrammar does: half a second and 4 MB on a desktop CPU."""


class Reading(IntEnum):
    """How much xgrammar takes of a pattern."""

    NOTHING = 0
    WITHOUT_ESCAPES = 1
    """The texts without characters that JSON escapes: quotes, backslashes, line breaks."""
    ALL = 2


@dataclass(frozen=True, slots=True)
class Plain:
    """A pattern, as its readers get it."""

    searched: str
    """For Python: search for it."""
    whole: str | None
    """For guidance, which matches it with the whole text; None if any text matches."""
    for_xgrammar: str | None
    """The same for xgrammar, which looks for it in the JSON text and does not know what an escape stands for."""
    by_xgrammar: Reading


@dataclass(frozen=True, slots=True)
class _Option:
    starts: bool
    body: Sequence
    ends: bool


@lru_cache(maxsize=256)
def plain_pattern(pattern: str) -> Plain:
    """Return a schema's pattern in plain form. ``ValueError`` names the construct that no grammar can follow."""
    options = _options(parse(pattern))
    searched = "|".join(
        ("\\A" if option.starts else "") + _written(option.body, _for_python) + ("\\Z" if option.ends else "")
        for option in options
    )
    searched = f"(?:{searched})"
    if any(_may_be_empty(option.body) and not (option.starts and option.ends) for option in options):
        return Plain(searched=searched, whole=None, for_xgrammar=None, by_xgrammar=Reading.ALL)
    wholes = [
        Sequence(
            (*(() if option.starts else (ANYTHING,)), option.body, *(() if option.ends else (ANYTHING,)))
        )
        for option in options
    ]
    whole = _possible(Choice(tuple(wholes)), NEVER_GENERATED)
    if whole is None:
        raise ValueError(_MATCHES_NOTHING)
    unescaped = _possible(whole, ESCAPED_IN_JSON)
    if unescaped is None or _num_ranges(unescaped) > _MOST_RANGES:
        reading = Reading.NOTHING
    else:
        reading = Reading.ALL if unescaped == whole else Reading.WITHOUT_ESCAPES
    return Plain(
        searched=searched,
        whole=f"^{_written(whole, _for_grammar)}$",
        for_xgrammar=f"^{_written(unescaped or whole, _for_grammar)}$",
        by_xgrammar=reading,
    )


@lru_cache(maxsize=256)
def plain_regex(regex: str) -> str:
    """Return a regular expression for a whole answer in plain form. ``ValueError`` as above."""
    whole = _possible(Choice(tuple(option.body for option in _options(parse(regex)))), NEVER_GENERATED)
    if whole is None:
        raise ValueError(_MATCHES_NOTHING)
    return _written(whole, _for_grammar)


def _options(node: Node) -> list[_Option]:
    """Return the alternatives of a pattern, without the anchors at their ends."""
    done: list[_Option] = []
    rest: list[tuple[bool, tuple[Node, ...], bool]] = [(False, (node,), False)]
    while rest:
        if len(done) + len(rest) > _MOST_OPTIONS:
            raise ValueError(f"more than {_MOST_OPTIONS} alternatives with anchors")
        starts, parts, ends = rest.pop(0)
        first, last = (parts[0], parts[-1]) if parts else (None, None)
        if isinstance(first, Sequence):
            rest.insert(0, (starts, (*first.parts, *parts[1:]), ends))
        elif isinstance(last, Sequence):
            rest.insert(0, (starts, (*parts[:-1], *last.parts), ends))
        elif first == Anchor("^"):
            rest.insert(0, (True, parts[1:], ends))
        elif last == Anchor("$"):
            rest.insert(0, (starts, parts[:-1], True))
        elif isinstance(first, Choice) and _has_anchor(first):
            rest[:0] = [(starts, (option, *parts[1:]), ends) for option in first.options]
        elif isinstance(last, Choice) and _has_anchor(last):
            rest[:0] = [(starts, (*parts[:-1], option), ends) for option in last.options]
        elif any(map(_has_anchor, parts)):
            raise ValueError("a '^' or '$' in the middle")
        else:
            done.append(_Option(starts, Sequence(parts), ends))
    return done


def _has_anchor(node: Node) -> bool:
    match node:
        case Anchor():
            return True
        case Sequence(parts) | Choice(parts):
            return any(map(_has_anchor, parts))
        case Repeat(part):
            return _has_anchor(part)
    return False


def _may_be_empty(node: Node) -> bool:
    match node:
        case Sequence(parts):
            return all(map(_may_be_empty, parts))
        case Choice(options):
            return any(map(_may_be_empty, options))
        case Repeat(part, minimum):
            return minimum == 0 or _may_be_empty(part)
    return False


def _possible(node: Node, impossible: Ranges) -> Node | None:
    """Return the part of a pattern that texts without these characters can match; None if there is none."""
    match node:
        case Characters(ranges):
            ranges = common(ranges, without(impossible))
            return Characters(ranges) if ranges else None
        case Sequence(parts):
            possible = [_possible(part, impossible) for part in parts]
            kept = tuple(part for part in possible if part is not None)
            return Sequence(kept) if len(kept) == len(parts) else None
        case Choice(parts):
            options = tuple(
                part for alternative in parts if (part := _possible(alternative, impossible)) is not None
            )
            return Choice(options) if options else None
        case Repeat(part, minimum, maximum):
            kept_part = _possible(part, impossible)
            if kept_part is None:
                return Sequence(()) if minimum == 0 else None
            return Repeat(kept_part, minimum, maximum)
    raise AssertionError(node)


def _num_ranges(node: Node) -> int:
    match node:
        case Characters(ranges):
            return len(ranges)
        case Sequence(parts) | Choice(parts):
            return sum(map(_num_ranges, parts))
        case Repeat(part, minimum, maximum):
            return _num_ranges(part) * max(1, minimum + 1 if maximum is None else maximum)
    return 0


def _written(node: Node, characters: Callable[[Ranges], str]) -> str:
    match node:
        case Characters(ranges):
            return characters(ranges)
        case Sequence(parts):
            return "".join(_written(part, characters) for part in parts) or "(?:)"
        case Choice(options):
            return f"(?:{'|'.join(_written(option, characters) for option in options)})"
        case Repeat(part, minimum, maximum):
            inner = _written(part, characters)
            if not isinstance(part, Characters):
                inner = f"(?:{inner})"
            return inner + _times(minimum, maximum)
    raise AssertionError(node)


def _times(minimum: int, maximum: int | None) -> str:
    match minimum, maximum:
        case 0, None:
            return "*"
        case 1, None:
            return "+"
        case _, None:
            return f"{{{minimum},}}"
    return f"{{{minimum}}}" if minimum == maximum else f"{{{minimum},{maximum}}}"


def _for_grammar(ranges: Ranges) -> str:
    # xgrammar forgets that a mark was escaped: a hyphen and a circumflex keep their escape, and are no ends of a range.
    if len(ranges) == 1 and ranges[0][0] == ranges[0][1]:
        return _character(ranges[0][0])
    marks = [mark for mark in _MARKS if common(ranges, ((mark, mark),))]
    others = common(ranges, without(tuple((mark, mark) for mark in _MARKS)))
    return f"[{''.join(map(_range, others))}{''.join(map(_character, marks))}]"


def _range(ends: tuple[int, int]) -> str:
    first, last = ends
    return _character(first) if first == last else f"{_character(first)}-{_character(last)}"


def _character(code: int) -> str:
    # The compilers differ in how they write a character as a number: it stands as it is.
    return _LINE_ENDS.get(code) or (f"\\{chr(code)}" if chr(code) in _SPECIAL else chr(code))


def _for_python(ranges: Ranges) -> str:
    written = "".join(f"\\U{first:08x}-\\U{last:08x}" for first, last in ranges)
    return f"[{written}]" if written else r"[^\s\S]"
