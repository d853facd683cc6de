"""Make the page of a comparison: one HTML file with the facts, and the rows whose answers differ with their prompts.

It loads nothing from elsewhere and runs no script.
"""

from html import escape

from pipemax_spark.report.comparison import NAMES, Comparison, answer_text, name_of, truth_text
from pipemax_spark.report.page_parts import STYLE, breakable, facts, text_block, tiles
from pipemax_spark.report.sampled_rows import Excerpt
from pipemax_spark.report.side_by_side import TriedRow
from pipemax_spark.report.summary import counted

_MOST_PAIRS = 200


def comparison_page(comparison: Comparison, *, input_name: str, shows_rows: bool) -> str:
    """Return the page. Without ``shows_rows`` it has no rows, prompts and answers."""
    equal, total = comparison.answered[0].equal_to(comparison.answered[1])
    shown = [(f"{len(comparison.pairs):,}", "rows"), (f"{len(comparison.differing):,}", "differ")]
    if total:
        shown.append((f"{equal / total:.1%}", "same answers"))
    for answers, column in comparison.golds.items():
        for side, name in enumerate(NAMES):
            right, rows = comparison.right(side, answers)
            if rows:
                shown.append((f"{right / rows:.1%}", f"of {name} agree with column {column!r}"))
    parts = [
        "<!doctype html><html lang='en'><head><meta charset='utf-8'><title>PipeMax: two prompts</title>",
        "<meta name='viewport' content='width=device-width, initial-scale=1'>",
        f"<link rel='icon' href='data:,'><style>{STYLE}</style></head><body>",
        f"<h1>Two prompts, {len(comparison.pairs):,} rows</h1><div>{breakable(input_name)}</div>",
        tiles(shown),
        facts(comparison.facts()),
        _pairs(comparison) if shows_rows else "",
        "</body></html>\n",
    ]
    return "\n".join(part for part in parts if part)


def _pairs(comparison: Comparison) -> str:
    differing = comparison.differing
    if not differing:
        return "<h2>No answers differ</h2>"
    left = len(differing) - _MOST_PAIRS
    rest = f"<p class='soft'>The answers of {counted(left, 'further row')} differ.</p>" if left > 0 else ""
    return (
        f"<h2>Rows whose answers differ</h2>{''.join(_pair(*pair) for pair in differing[:_MOST_PAIRS])}{rest}"
    )


def _pair(one: TriedRow, two: TriedRow) -> str:
    truth = f" · <span class='soft'>truth</span> {breakable(truth_text(one))}" if one.truths else ""
    sides = "".join(_side(name, row) for name, row in zip(NAMES, (one, two), strict=True))
    return f"<div class='row'><div><span class='soft'>row</span> {breakable(name_of(one))}{truth}</div>{sides}</div>"


def _side(name: str, row: TriedRow) -> str:
    prompt, answer = Excerpt.of(row.prompt or ""), Excerpt.of(answer_text(row))
    rights = [is_right for _, is_right in row.truths.values()]
    verdict = "" if len(rights) != 1 else ", right" if rights[0] else ", wrong"
    return (
        f"<div class='pair'>{text_block(f'prompt {name}', prompt.text, left_out=prompt.left_out)}"
        f"{text_block(f'answer {name}{verdict}', answer.text, left_out=answer.left_out, is_bad=bool(row.errors))}</div>"
        f"<div class='name'>{escape(row.facts)}</div>"
    )
