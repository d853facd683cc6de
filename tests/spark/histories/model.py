"""What a job must make of its tables, in a few lines: which rows a run adds to the output or replaces there.

A row's identity is its id or, without ids, the values of all columns that the input has now.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from tests.fakes.settings import expected_text

Row = tuple[tuple[str, Any], ...]
"""A row's values by column, sorted by name; null values are left out."""
MAX_TOKENS = 16


def row_of(values: dict[str, Any]) -> Row:
    return tuple(sorted((name, value) for name, value in values.items() if value is not None))


@dataclass(frozen=True, slots=True)
class Entry:
    """A row of the output: what it was annotated for, and with what."""

    spec: str
    """The template's first word, in which the specs differ."""
    row: Row
    outcome: str
    """The answer, or the error's code."""

    @property
    def is_error(self) -> bool:
        return self.outcome in ("empty_prompt", "engine_error")


def outcome_of(spec: str, row: Row) -> str:
    match dict(row).get("text"):
        case None:
            return "empty_prompt"
        case "[[error]]":
            return "engine_error"
        case text:
            return expected_text(f"{spec} {text}", MAX_TOKENS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What decides which rows a run does."""

    spec: str
    columns: tuple[str, ...]
    """The input's columns that go to the output."""
    has_ids: bool
    where: Callable[[Row], bool] = lambda _: True
    retries_errors: bool = False
    redoes_changed: bool = False

    def identity(self, row: Row) -> object:
        if self.has_ids:
            return dict(row)["id"]
        return tuple((name, value) for name, value in row if name in self.columns)

    def grouped(self, rows: Iterable[Row]) -> dict[object, list[Row]]:
        groups: dict[object, list[Row]] = defaultdict(list)
        for row in filter(self.where, rows):
            groups[self.identity(row)].append(row)
        return groups


Held = Counter[Entry]
"""An output's rows."""


def after(request: Request, held: Held, whole: Sequence[Row], appended: Sequence[Row] | None = None) -> Held:
    """Return the output after a complete run over the whole input or, of an incremental one, over what was appended."""
    of_spec = defaultdict(list)
    for entry in held.elements():
        if entry.spec == request.spec:
            of_spec[request.identity(entry.row)].append(entry)
    result, in_whole = Counter(held), request.grouped(whole)
    for key, rows in (in_whole if appended is None else request.grouped(appended)).items():
        made = Entry(request.spec, _kept(rows[0], request.columns), outcome_of(request.spec, rows[0]))
        stale = [entry for entry in of_spec[key] if _is_redone(request, entry, made)]
        num_done = len(of_spec[key]) - len(stale)
        num_left = len(rows) - num_done
        if appended is not None and not request.has_ids:
            num_left = min(len(rows), len(in_whole[key]) - num_done)
        if num_left > 0:
            result -= Counter(stale[:num_left])
            result[made] += num_left
    return result


def is_between(request: Request, actual: Held, before: Held, end: Held) -> bool:
    """Whether a run that makes ``end`` of ``before`` can have left ``actual``: of each row, all or some, each once."""
    tables = [_by_key(request, table) for table in (actual, before, end)]
    keys = {key for table in tables for key in table}
    found = ([table.get(key, Counter()) for table in tables] for key in keys)
    return all(now in (old, new) or old <= now <= new for now, old, new in found)


def _by_key(request: Request, table: Held) -> dict[object, Held]:
    groups: dict[object, Held] = defaultdict(Counter)
    for entry, number in table.items():
        groups[entry.spec, request.identity(entry.row)][entry] += number
    return groups


def _is_redone(request: Request, entry: Entry, made: Entry) -> bool:
    if request.retries_errors and entry.is_error:
        return True
    return request.redoes_changed and dict(entry.row).get("text") != dict(made.row).get("text")


def _kept(row: Row, columns: tuple[str, ...]) -> Row:
    return tuple((name, value) for name, value in row if name in columns)
