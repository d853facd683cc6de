"""Say which of two prompts is better: where their answers to the same rows differ, which is right, what each costs.

This module prints; it knows neither Spark nor engines. A figure of a few rows comes with its interval at 95 %.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from rich.table import Table
from rich.text import Text

from pipemax_spark.report.intervals import mcnemar_p, share_text
from pipemax_spark.report.page_parts import duration
from pipemax_spark.report.side_by_side import Answered, TriedRow, plain_text, shortened
from pipemax_spark.report.summary import counted
from pipemax_spark.report.terminal import Terminal
from pipemax_spark.rows.annotated import ANNOTATION

SHOWN_PAIRS = 20
NAMES = ("A", "B")
_LABEL_WIDTH = 19


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What two prompts gave for the same rows."""

    templates: tuple[str, str]
    answered: tuple[Answered, Answered]
    """The same rows in the same order."""
    rows_in: int
    """Rows of the whole input."""
    golds: Mapping[str, str]
    """Column of answers → the input's column of right answers; empty without ``--gold-column``."""
    price_per_hour: float | None = None

    @property
    def pairs(self) -> list[tuple[TriedRow, TriedRow]]:
        """The rows, each as A and as B answered it."""
        first, second = self.answered
        return list(zip(first.rows, second.rows, strict=True))

    @property
    def differing(self) -> list[tuple[TriedRow, TriedRow]]:
        """The rows whose answers, or errors, are not the same."""
        return [
            (one, two)
            for one, two in self.pairs
            if one.answers != two.answers or one.errors.keys() != two.errors.keys()
        ]

    def right(self, side: int, answers: str) -> tuple[int, int]:
        """Return how many rows side 0 (A) or 1 (B) answers rightly, and how many have a right answer."""
        rights = [row.truths[answers][1] for row in self.answered[side].rows if answers in row.truths]
        return sum(rights), len(rights)

    def only_right(self, answers: str) -> tuple[int, int]:
        """Return how many rows only A, and how many only B, answers rightly."""
        rights = [
            (one.truths[answers][1], two.truths[answers][1])
            for one, two in self.pairs
            if answers in one.truths
        ]
        return rights.count((True, False)), rights.count((False, True))

    def facts(self) -> list[tuple[str, str]]:
        """Return what is printed: name and text."""
        equal, total = self.answered[0].equal_to(self.answered[1])
        rows = f"{equal:,} of {total:,} rows that both have answered"
        facts = [(f"Template {name}", repr(text)) for name, text in zip(NAMES, self.templates, strict=True)]
        facts.append(("Same answers", f"{share_text(equal, total)}: {rows}" if total else rows))
        for answers, column in self.golds.items():
            facts += self._accuracies(answers, column)
        for side, name in enumerate(NAMES):
            facts.append((f"Cost of {name}", self._cost(side)))
        note = "So few rows never fill an engine, so that the whole table takes less; --dry-run knows better"
        return [*facts, ("", note)]

    def _accuracies(self, answers: str, column: str) -> Iterator[tuple[str, str]]:
        of_question = f"{answers}: " if answers != ANNOTATION else ""
        for side, name in enumerate(NAMES):
            right, rows = self.right(side, answers)
            text = f"{share_text(right, rows)}: {right:,} of {rows:,} rows" if rows else "no row has a value"
            yield f"Accuracy of {name}", f"{of_question}{text}, by column {column!r}"
        only_a, only_b = self.only_right(answers)
        p = mcnemar_p(only_a, only_b)
        yield (
            "Only one is right",
            f"{of_question}A in {counted(only_a, 'row')}, B in {only_b:,}; equally good prompts differ so much with "
            f"p = {p:.2g} (McNemar's exact test)",
        )

    def _cost(self, side: int) -> str:
        answered = self.answered[side]
        rows, failed = len(answered.rows), sum(bool(row.errors) for row in answered.rows)
        read = sum(row.prompt_tokens for row in answered.rows) / rows
        generated = sum(row.completion_tokens for row in answered.rows) / rows
        seconds = self.rows_in / answered.rows_per_s
        cost = "" if self.price_per_hour is None else f", cost {seconds / 3600 * self.price_per_hour:,.2f}"
        errors = f"; {counted(failed, 'row')} with an error" if failed else ""
        return (
            f"{read:,.1f} tokens read and {generated:,.1f} generated per row, {1 / answered.rows_per_s:.3f} s; "
            f"{self.rows_in:,} rows: {read * self.rows_in:,.0f} and {generated * self.rows_in:,.0f} tokens, "
            f"{duration(seconds)}{cost}{errors}"
        )

    def __str__(self) -> str:
        """Return the facts, a line each."""
        return "\n".join(f"{name:<{_LABEL_WIDTH}}{text}" for name, text in self.facts())

    def _repr_html_(self) -> str:
        """Return the facts as a table: notebooks show it for a cell's value."""
        cells = (
            f"<tr><th style='text-align:left'>{escape(name)}</th><td style='text-align:left'>{escape(text)}</td></tr>"
            for name, text in self.facts()
        )
        return f"<table>{''.join(cells)}</table>"


def print_comparison(terminal: Terminal, comparison: Comparison, *, shows_rows: bool) -> None:
    """Print rows that differ, side by side on a terminal and line by line elsewhere, and the facts."""
    console, differing = terminal.console, comparison.differing
    console.print()
    if shows_rows and differing:
        if console.is_terminal:
            console.print(_table(differing[:SHOWN_PAIRS], comparison.golds), soft_wrap=False)
        else:
            for pair in differing[:SHOWN_PAIRS]:
                for line in _lines(pair):
                    console.print(line, markup=False, highlight=False, soft_wrap=True)
                console.print()
        if (left := len(differing) - SHOWN_PAIRS) > 0:
            console.print(
                f"The answers of {counted(left, 'further row')} differ.", markup=False, highlight=False
            )
    for name, text in comparison.facts():
        console.print(f"{name:<{_LABEL_WIDTH}}{text}", markup=False, highlight=False, soft_wrap=True)


def answer_text(row: TriedRow) -> str:
    """Return a row's answers, each with its question's name if there are several, and its errors."""
    parts = []
    for name, answer in row.answers.items():
        label = f"{name}: " if len(row.answers) > 1 else ""
        if answer is not None:
            parts.append(f"{label}{answer}")
        if name in row.errors:
            parts.append(f"{label}{': '.join(row.errors[name])}")
    return plain_text("\n".join(parts))


def name_of(row: TriedRow) -> str:
    """Return the row's ids, or its place among the drawn rows."""
    return plain_text(", ".join(row.ids.values())) if row.ids else f"{row.number}"


def truth_text(row: TriedRow) -> str:
    """Return the row's right answers."""
    is_one = len(row.answers) == 1
    texts = (gold if is_one else f"{name}: {gold}" for name, (gold, _) in row.truths.items())
    return plain_text("\n".join(texts))


def _table(pairs: Sequence[tuple[TriedRow, TriedRow]], golds: Mapping[str, str]) -> Table:
    table = Table(show_lines=True, expand=True, title="Rows whose answers differ", title_justify="left")
    table.add_column("row", overflow="fold", max_width=24)
    for name in NAMES:
        table.add_column(f"answer {name}", ratio=1, overflow="fold")
    if golds:
        table.add_column("truth", overflow="fold", max_width=24)
    for one, two in pairs:
        answers = [Text(shortened(answer_text(row))) for row in (one, two)]
        table.add_row(Text(name_of(one)), *answers, *([Text(truth_text(one))] if golds else []))
    return table


def _lines(pair: tuple[TriedRow, TriedRow]) -> Iterator[str]:
    """Yield a pair's lines, each under the row and what it is, so that ``grep`` finds whole rows and parts."""
    row, texts = name_of(pair[0]), [(name, answer_text(row)) for name, row in zip(NAMES, pair, strict=True)]
    if pair[0].truths:
        texts.append(("truth", truth_text(pair[0])))
    for name, text in texts:
        for line in text.split("\n"):
            yield f"{row:>4} {name:<6} {line}".rstrip()
