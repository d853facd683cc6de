"""Say what a row of the table of fields holds; ``Sampling`` and ``Completion`` of ``pipemax.generation`` are the table.

The wire, the annotation's struct, a row's overrides, batch files, ``--help`` and the docs are made of these rows. They
stand in the metadata of the dataclasses' fields, which give each its name, its Python type and its default.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

import pyarrow as pa

_T = TypeVar("_T")
_ROW = "row of the table"


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A setting for generating rows."""

    help: str
    """As ``--help`` shows it."""
    row_type: pa.DataType | None
    """Its type in a row's overrides; None if it can be set only for a whole job."""
    openai_names: tuple[str, ...]
    """Its names in the body of a batch file's request; if a request has several of them, the last one counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Carried:
    """A value that a completion carries to the annotation."""

    help: str
    """As the docs show it, in Markdown."""
    wire_type: pa.DataType
    """Its type on the wire and in the annotation."""
    is_asked: Callable[[Any], bool]
    """Whether an annotation made with this ``Sampling`` has it, besides the fields of the task's answer."""


def setting(
    default: _T, text: str, *, row_type: pa.DataType | None = None, openai_names: tuple[str, ...] = ()
) -> _T:
    """Return a dataclass's field that is a setting."""
    return field(
        default=default, metadata={_ROW: Setting(help=text, row_type=row_type, openai_names=openai_names)}
    )


def carried(
    default: _T, wire_type: pa.DataType, text: str, *, is_asked: Callable[[Any], bool] = lambda _: False
) -> _T:
    """Return a dataclass's field that a completion carries."""
    return field(default=default, metadata={_ROW: Carried(help=text, wire_type=wire_type, is_asked=is_asked)})


def table_rows(kind: type, row_kind: type[_T]) -> dict[str, _T]:
    """Return the table's rows of a dataclass by the names of their fields, in their order."""
    rows = {column.name: column.metadata.get(_ROW) for column in fields(kind)}
    return {name: row for name, row in rows.items() if isinstance(row, row_kind)}
