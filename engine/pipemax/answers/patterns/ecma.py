r"""Read a regular expression as ECMA-262 does with the flag u, which JSON Schema asks for.

What stands for a set of characters becomes that set, so that nobody after this module needs to know ``\d``, ``\p{L}``
or ``.``. Constructs that no grammar can follow (lookaround, references to groups, word boundaries) are refused by name.
More lenient than the standard: any punctuation may be escaped, a ``]`` or ``}`` without a partner and a ``-`` beside a
``\d`` in a class stand for themselves.
"""

import re
from dataclasses import dataclass
from typing import Literal

from pipemax.answers.patterns.characters import (
    ANY,
    DIGITS,
    LAST,
    LINE_ENDS,
    SPACE,
    WORD,
    Ranges,
    property_of,
    union,
    without,
)


@dataclass(frozen=True, slots=True)
class Characters:
    """One character of a set."""

    ranges: Ranges


@dataclass(frozen=True, slots=True)
class Sequence:
    """Parts that follow one another."""

    parts: "tuple[Node, ...]"


@dataclass(frozen=True, slots=True)
class Choice:
    """One of several parts."""

    options: "tuple[Node, ...]"


@dataclass(frozen=True, slots=True)
class Repeat:
    """A part, several times; any number of times above ``least`` if ``most`` is None."""

    part: "Node"
    minimum: int
    maximum: int | None


@dataclass(frozen=True, slots=True)
class Anchor:
    """The beginning of the text (``^``) or its end (``$``)."""

    at: Literal["^", "$"]


Node = Characters | Sequence | Choice | Repeat | Anchor

_CLASSES = {"d": DIGITS, "w": WORD, "s": SPACE}
_CONTROLS = {"t": 0x09, "n": 0x0A, "v": 0x0B, "f": 0x0C, "r": 0x0D}
_REPETITION = re.compile(r"\{(\d+)(?:(,)(\d*))?\}", re.ASCII)
_NAME = re.compile(r"\?<([^\W\d][\w$]*)>")
_LOOKAROUND = {"?=": "lookahead", "?!": "lookahead", "?<=": "lookbehind", "?<!": "lookbehind"}
_UNICODE = re.compile(r"u(?:\{([0-9A-Fa-f]+)\}|([0-9A-Fa-f]{4}))")
_MOST_NESTED = 100


def parse(pattern: str) -> Node:
    """Return the pattern's tree. ``ValueError`` names the construct that cannot be read."""
    reader = _Reader(pattern)
    node = reader.choice()
    if reader.place < len(pattern):
        raise ValueError("a ')' that closes nothing")
    return node


class _Reader:
    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._depth = 0
        self.place = 0

    def choice(self) -> Node:
        options = [self._sequence()]
        while self._takes("|"):
            options.append(self._sequence())
        return options[0] if len(options) == 1 else Choice(tuple(options))

    def _sequence(self) -> Node:
        parts = []
        while self.place < len(self._pattern) and self._pattern[self.place] not in "|)":
            parts.append(self._repeated(self._atom()))
        return parts[0] if len(parts) == 1 else Sequence(tuple(parts))

    def _repeated(self, part: Node) -> Node:
        if self._takes("*"):
            minimum, maximum = 0, None
        elif self._takes("+"):
            minimum, maximum = 1, None
        elif self._takes("?"):
            minimum, maximum = 0, 1
        elif match := _REPETITION.match(self._pattern, self.place):
            self.place = match.end()
            minimum = int(match[1])
            maximum = (int(match[3]) if match[3] else None) if match[2] else minimum
        else:
            return part
        if isinstance(part, Anchor) or (maximum is not None and maximum < minimum):
            raise ValueError(f"the repetition before character {self.place + 1}, which repeats nothing")
        self._takes("?")  # the shortest or the longest match: the same texts match
        return Repeat(part, minimum, maximum)

    def _atom(self) -> Node:
        match char := self._next():
            case "^" | "$":
                return Anchor(char)
            case ".":
                return Characters(without(LINE_ENDS))
            case "[":
                return self._class()
            case "(":
                return self._group()
            case "\\":
                return self._escape()
            case "*" | "+" | "?" | "{":
                raise ValueError(f"a {char!r} that repeats nothing; write \\{char} for the character")
        return Characters(((ord(char), ord(char)),))

    def _group(self) -> Node:
        self._depth += 1
        if self._depth > _MOST_NESTED:
            raise ValueError(f"more than {_MOST_NESTED} groups within one another")
        for mark, name in _LOOKAROUND.items():
            if self._pattern.startswith(mark, self.place):
                raise ValueError(f"the {name} '({mark}'")
        if named := _NAME.match(self._pattern, self.place):
            self.place = named.end()
        elif not self._takes("?:") and self._pattern.startswith("?", self.place):
            raise ValueError(f"the group '({self._pattern[self.place : self.place + 3]}'")
        node = self.choice()
        if not self._takes(")"):
            raise ValueError("a '(' that is not closed")
        self._depth -= 1
        return node

    def _escape(self) -> Node:
        if self.place == len(self._pattern):
            raise ValueError("a '\\' at the end")
        char = self._pattern[self.place]
        if char in "bB":
            raise ValueError(f"the word boundary '\\{char}'")
        if char in "123456789k":
            raise ValueError(f"the reference '\\{char}' to a group")
        return Characters(self._escaped())

    def _escaped(self) -> Ranges:
        """Return the characters that an escape stands for, after its backslash."""
        char = self._next()
        if char in "dwsDWS":
            ranges = _CLASSES[char.lower()]
            return without(ranges) if char.isupper() else ranges
        if char in "pP":
            return self._property(negated=char == "P")
        code = self._escaped_code(char)
        return ((code, code),)

    def _escaped_code(self, char: str) -> int:
        pattern, place = self._pattern, self.place
        if char in _CONTROLS:
            return _CONTROLS[char]
        if char == "0" and not pattern[place : place + 1].isdigit():
            return 0
        if char == "c" and re.match("[A-Za-z]", pattern[place:]):
            return ord(self._next()) % 32
        if char == "x" and (match := re.match("[0-9A-Fa-f]{2}", pattern[place:])):
            self.place += 2
            return int(match[0], 16)
        if char == "u" and (match := _UNICODE.match(pattern, place - 1)):
            self.place = match.end()
            code = int(match[1] or match[2], 16)
            if code <= LAST:
                return self._paired(code) if match[2] else code
        if char.isascii() and not char.isalnum() and char != "_":
            return ord(char)
        raise ValueError(f"the escape '\\{char}', which ECMA-262 does not know")

    def _paired(self, code: int) -> int:
        """Return the character of two escapes of surrogates, if this is the first of them."""
        second = re.compile(r"\\u([dD][c-fC-F][0-9A-Fa-f]{2})").match(self._pattern, self.place)
        if not 0xD800 <= code < 0xDC00 or second is None:
            return code
        self.place = second.end()
        return 0x10000 + ((code - 0xD800) << 10) + (int(second[1], 16) - 0xDC00)

    def _property(self, *, negated: bool) -> Ranges:
        end = self._pattern.find("}", self.place)
        if not self._takes("{") or end < 0:
            raise ValueError("a '\\p' without the name of a property, as in \\p{L}")
        name = self._pattern[self.place : end]
        self.place = end + 1
        try:
            ranges = property_of(name)
        except ValueError:
            raise ValueError(f"the property '\\p{{{name}}}', which Unicode does not have") from None
        return without(ranges) if negated else ranges

    def _class(self) -> Node:
        negated = self._takes("^")
        ranges: list[tuple[int, int]] = []
        while not self._takes("]"):
            if self._pattern.startswith("[:", self.place) and ":]" in self._pattern[self.place :]:
                raise ValueError("a POSIX class '[:…:]', which ECMA-262 does not know")
            first = self._class_atom()
            if not self._is_range():
                ranges += first
                continue
            self.place += 1
            last = self._class_atom()
            if len(first) > 1 or len(last) > 1 or first[0][0] != first[0][1] or last[0][0] != last[0][1]:
                ranges += [*first, *last, (0x2D, 0x2D)]  # next to \d a hyphen is a hyphen
            elif first[0][0] > last[0][0]:
                raise ValueError(
                    f"the range '{chr(first[0][0])}-{chr(last[0][0])}', whose end is before its start"
                )
            else:
                ranges.append((first[0][0], last[0][0]))
        return Characters(without(union(ranges)) if negated else union(ranges))

    def _is_range(self) -> bool:
        following = self._pattern[self.place : self.place + 2]
        return following.startswith("-") and following != "-]" and len(following) == 2

    def _class_atom(self) -> Ranges:
        if self.place == len(self._pattern):
            raise ValueError("a '[' that is not closed")
        char = self._next()
        if char != "\\":
            return ((ord(char), ord(char)),)
        if self._takes("b"):
            return ((0x08, 0x08),)
        if self.place == len(self._pattern):
            raise ValueError("a '\\' at the end")
        return self._escaped()

    def _next(self) -> str:
        self.place += 1
        return self._pattern[self.place - 1]

    def _takes(self, text: str) -> bool:
        if self._pattern.startswith(text, self.place):
            self.place += len(text)
            return True
        return False


ANYTHING = Repeat(Characters(ANY), 0, None)
