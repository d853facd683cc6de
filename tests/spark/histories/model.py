"""What a job must make of its tables, in a few lines: which rows a run adds to the output or replaces there.

A row's identity is its id or, without ids, the values of all columns that the input has now.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
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
    replaces_specs: bool = False

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
            if request.replaces_specs and not request.has_ids:
                result -= _of_other_specs(request, held, key, num_left)
    if request.replaces_specs and request.has_ids:
        answered = {dict(entry.row)["id"] for entry in result if entry.spec == request.spec}
        result = Counter({e: n for e, n in result.items() if not _is_replaced(request, e, answered)})
    return result


def _is_replaced(request: Request, entry: Entry, answered: set[Any]) -> bool:
    return entry.spec != request.spec and dict(entry.row)["id"] in answered


def _of_other_specs(request: Request, held: Held, key: object, number: int) -> Held:
    """Return the rows of other specs, of each up to ``number``, that answers to equal rows replace."""
    others: dict[str, list[Entry]] = defaultdict(list)
    for entry in held.elements():
        if entry.spec != request.spec and request.identity(entry.row) == key:
            others[entry.spec].append(entry)
    return Counter(entry for entries in others.values() for entry in entries[:number])


def is_between(request: Request, actual: Held, before: Held, end: Held) -> bool:
    """Whether a run that makes ``end`` of ``before`` can have left ``actual``: of each row, all or some, each once.

    An answer and the one of another spec that it replaces come and go at once, so no row is ever without one.
    """
    of_specs = _triples(request, (actual, before, end), by_spec=True)
    if not all(now in (old, new) or old <= now <= new or new <= now <= old for now, old, new in of_specs):
        return False
    totals = (
        [group.total() for group in groups]
        for groups in _triples(request, (actual, before, end), by_spec=False)
    )
    return all(min(old, new) <= now <= max(old, new) for now, old, new in totals)


def _triples(request: Request, tables: Sequence[Held], *, by_spec: bool) -> Iterator[list[Held]]:
    """Yield the rows that each table has of a row and, if ``by_spec``, of a spec."""
    grouped: dict[object, list[Held]] = defaultdict(lambda: [Counter() for _ in tables])
    for place, table in enumerate(tables):
        for entry, number in table.items():
            key = request.identity(entry.row)
            grouped[(entry.spec, key) if by_spec else key][place][entry] += number
    yield from grouped.values()


def _is_redone(request: Request, entry: Entry, made: Entry) -> bool:
    if request.retries_errors and entry.is_error:
        return True
    return request.redoes_changed and dict(entry.row).get("text") != dict(made.row).get("text")


def _kept(row: Row, columns: tuple[str, ...]) -> Row:
    return tuple((name, value) for name, value in row if name in columns)
