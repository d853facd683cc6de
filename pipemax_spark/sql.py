"""Quote names and strings for SQL."""


def quoted(name: str) -> str:
    """Quote the name of a column or a table."""
    return "`" + name.replace("`", "``") + "`"


def literal(text: str) -> str:
    """Quote a string. SQL would read JSON's own escapes too, hence the doubled backslashes."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
