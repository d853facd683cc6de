"""Quote names and strings for SQL, and read names that users have quoted."""

import re

_NAME = re.compile(r"`((?:[^`]|``)*)`(?!`)")
"""A name in backticks; a backtick within it is doubled."""


def quoted(name: str) -> str:
    """Quote the name of a column or a table."""
    return "`" + name.replace("`", "``") + "`"


def literal(text: str) -> str:
    """Quote a string. SQL would read JSON's own escapes too, hence the doubled backslashes."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def split_names(text: str, separator: str) -> list[str]:
    """Return the names that a separator divides: without blanks around them, or in backticks, exactly as they are.

    A separator within backticks divides nothing. A backtick elsewhere in a name is a character like any other.
    """
    names, start, place = [], 0, 0
    while place < len(text):
        is_start = not text[start:place].strip()
        if is_start and (match := _NAME.match(text, place)) is not None:
            place = match.end()
        elif text.startswith(separator, place):
            names.append(text[start:place])
            start = place = place + len(separator)
        else:
            place += 1
    return [_plain(name) for name in (*names, text[start:])]


def _plain(name: str) -> str:
    match = _NAME.fullmatch(name.strip())
    return name.strip() if match is None else match[1].replace("``", "`")
