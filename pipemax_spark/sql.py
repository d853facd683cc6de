"""Names and strings as SQL spells them."""


def quoted(name: str) -> str:
    """A column's or table's name."""
    return "`" + name.replace("`", "``") + "`"


def literal(text: str) -> str:
    """A string. JSON's own escapes would be read by SQL too, hence the doubled backslashes."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
