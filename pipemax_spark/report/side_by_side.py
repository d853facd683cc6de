"""Print prompts with their answers: in a table on a terminal, elsewhere line by line and in full."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from pipemax_spark.report.terminal import Terminal

_SHOWN_CHARS = 600
"""Of a prompt in the table; its middle is left out."""
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""Characters that a terminal would obey."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TriedRow:
    """A row that an engine has answered once."""

    number: int
    """The row's place in the input, from 1."""
    prompt: str | None
    """As the row makes it, without the system message and the chat template; None if a column of it is null."""
    answers: Mapping[str, str | None]
    """The answer, by its column's name: one, or one for each question."""
    errors: Mapping[str, tuple[str, str]]
    """Code and message of each answer that failed, by its column's name."""
    prompt_tokens: int
    completion_tokens: int
    seconds: float
    """From when the rows were sent until this one was complete."""
    compared: Sequence[Any] = ()
    """What a cascade compares of each answer."""
    is_cut: bool = False
    """Whether an answer ended at ``--max-tokens``."""
    ids: Mapping[str, str] = field(default_factory=dict)
    """The columns that tell the row from others, by name; empty without ``--id-columns``."""
    truths: Mapping[str, tuple[str, bool]] = field(default_factory=dict)
    """The right answer, and whether it was the answer, by the answer's column; without rows' nulls."""

    @property
    def facts(self) -> str:
        cut = ", cut at --max-tokens" if self.is_cut else ""
        return f"{self.prompt_tokens:,} + {self.completion_tokens:,} tokens, {self.seconds:.1f} s{cut}"


@dataclass(frozen=True, slots=True)
class Answered:
    """What one engine, or one prompt, gave for the rows; at least one."""

    rows: Sequence[TriedRow]

    @property
    def seconds(self) -> float:
        """From when the rows were sent until the last was complete, without Spark's work before and after."""
        return max(0.001, *(row.seconds for row in self.rows))

    @property
    def rows_per_s(self) -> float:
        return len(self.rows) / self.seconds

    def equal_to(self, other: "Answered") -> tuple[int, int]:
        """Return of how many rows the answers are equal, and how many rows both have answered."""
        pairs = [
            (one.answers, two.answers)
            for one, two in zip(self.rows, other.rows, strict=True)
            if not one.errors and not two.errors
        ]
        return sum(one == two for one, two in pairs), len(pairs)


def print_rows(terminal: Terminal, rows: Sequence[TriedRow], *, seconds: float) -> None:
    """Print the rows and their totals. ``seconds`` is how long all of them took, with Spark's share."""
    console = terminal.console
    console.print()
    if console.is_terminal:
        console.print(_table(rows), soft_wrap=False)
    else:
        _print_lines(console, rows)
    terminal.say("Rows", _totals(rows, seconds=seconds))


def _table(rows: Sequence[TriedRow]) -> Table:
    table = Table(show_lines=True, expand=True)
    table.add_column("row", justify="right", no_wrap=True)
    table.add_column("prompt", ratio=1, overflow="fold")
    table.add_column("answer", ratio=1, overflow="fold")
    table.add_column("tokens", justify="right", no_wrap=True)
    table.add_column("s", justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            f"{row.number}",
            Text(shortened(plain_text(row.prompt or ""))),
            _answer_cell(row),
            f"{row.prompt_tokens:,} +\n{row.completion_tokens:,}",
            f"{row.seconds:.1f}",
        )
    return table


def _answer_cell(row: TriedRow) -> Text:
    cell = Text()
    for name, answer in row.answers.items():
        if cell:
            cell.append("\n")
        if len(row.answers) > 1:
            cell.append(f"{name}: ", style="bold")
        if answer is not None:
            cell.append(plain_text(answer))
        if name in row.errors:
            gap = "" if answer is None else "\n"
            cell.append(f"{gap}{plain_text(': '.join(row.errors[name]))}", style="red")
    if row.is_cut:
        cell.append("\n(cut at --max-tokens)", style="yellow")
    return cell


def _print_lines(console: Console, rows: Sequence[TriedRow]) -> None:
    """Print each line of a row under the row's number and what it is, so that ``grep`` finds whole rows and parts."""
    for row in rows:
        for name, text in _named_texts(row):
            for line in plain_text(text).split("\n"):
                console.print(
                    f"{row.number:>4} {name:<7} {line}".rstrip(),
                    markup=False,
                    highlight=False,
                    soft_wrap=True,
                )
        console.print()


def _named_texts(row: TriedRow) -> Iterator[tuple[str, str]]:
    yield "prompt", row.prompt or ""
    for name, answer in row.answers.items():
        label = name if len(row.answers) > 1 else "answer"
        if answer is not None:
            yield label, answer
        if name in row.errors:
            yield "error", f"{f'{name}: ' if len(row.answers) > 1 else ''}{': '.join(row.errors[name])}"
    yield "took", row.facts


def _totals(rows: Sequence[TriedRow], *, seconds: float) -> str:
    errors = Counter(code for row in rows for code, _ in row.errors.values())
    failed = sum(bool(row.errors) for row in rows)
    parts = [f"{len(rows) - failed:,} of {len(rows):,} rows without an error"]
    parts += [f"{count:,} {code}" for code, count in errors.most_common()]
    if num_cut := sum(row.is_cut for row in rows):
        parts.append(f"{num_cut:,} cut at --max-tokens")
    read, generated = sum(row.prompt_tokens for row in rows), sum(row.completion_tokens for row in rows)
    return f"{', '.join(parts)}; {read:,} tokens read, {generated:,} generated, {seconds:.1f} s in all"


def shortened(text: str) -> str:
    """Leave out the middle of a long text: a template's question may stand at either end."""
    if len(text) <= _SHOWN_CHARS:
        return text
    beginning, end = text[: _SHOWN_CHARS * 2 // 3], text[-_SHOWN_CHARS // 3 :]
    return f"{beginning} … ({len(text) - len(beginning) - len(end):,} characters) … {end}"


def plain_text(text: str) -> str:
    """Return the text with line breaks and tabs as its only control characters."""
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", text.replace("\r\n", "\n"))
