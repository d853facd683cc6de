"""The prompt of each row as a Spark expression: a column as it is, or a template over columns.

Rendering happens in the JVM. A null in any column of a template makes the prompt null, which becomes an error row.
"""

import difflib
import string
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSource:
    """Where prompts come from; exactly one field is set."""

    prompt_column: str | None = None
    messages_column: str | None = None
    template: str | None = None

    def __post_init__(self) -> None:
        given = [name for name in self.__slots__ if getattr(self, name) is not None]
        if len(given) != 1:
            what = " and ".join(name.replace("_", "-") for name in given) or "none of them"
            raise ValueError(
                f"give exactly one of prompt-column, messages-column and template; {what} {_were(len(given))} given"
            )

    def column(self, columns: Sequence[str]) -> Any:
        """A string column (or array<struct<role, content>> for messages). ``ValueError`` for unknown columns."""
        from pyspark.sql import functions as F  # noqa: N812 - Spark's own convention

        if self.template is None:
            name = self.prompt_column or self.messages_column or ""
            check_column(name, columns)
            column = F.col(quoted(name))
            return column.cast("string") if self.prompt_column else column.cast(MESSAGES_TYPE)
        parts = [
            F.lit(text) if name is None else F.col(quoted(name)).cast("string")
            for text, name in parse_template(self.template, columns)
        ]
        return F.concat(*parts)


MESSAGES_TYPE = "array<struct<role:string,content:string>>"


def parse_template(template: str, columns: Sequence[str]) -> list[tuple[str, str | None]]:
    """(literal text, None) and ("", column) in order. ``{{`` and ``}}`` stand for braces."""
    parts: list[tuple[str, str | None]] = []
    try:
        for literal, name, spec, conversion in string.Formatter().parse(template):
            if literal:
                parts.append((literal, None))
            if name is None:
                continue
            if spec or conversion:
                raise ValueError(
                    f"{{{name}…}} has a format or conversion; only a column's name may stand in braces"
                )
            check_column(name, columns)
            parts.append(("", name))
    except ValueError as error:
        raise ValueError(f"template {template!r}: {error}") from error
    if not any(name for _, name in parts):
        raise ValueError(
            f"template {template!r} names no column, so every prompt would be the same; write {{column}}"
        )
    return parts


def check_column(name: str, columns: Sequence[str]) -> None:
    """``ValueError`` with the columns that exist, and the one that was probably meant."""
    if name in columns:
        return
    close = difflib.get_close_matches(name, columns, n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    raise ValueError(f"there is no column {name!r}.{hint} The columns are: {', '.join(columns)}")


def quoted(name: str) -> str:
    return "`" + name.replace("`", "``") + "`"


def _were(count: int) -> str:
    return "were" if count > 1 else "was"
