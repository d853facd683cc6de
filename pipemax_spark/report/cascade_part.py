"""Show on a page what a cascade has certified, and where the two models disagree, as HTML."""

from collections.abc import Mapping
from html import escape
from typing import Any

from pipemax_spark.report.cascade_texts import cascade_facts
from pipemax_spark.report.intervals import share_text
from pipemax_spark.report.page_parts import facts as facts_list
from pipemax_spark.report.page_parts import numbers_table
from pipemax_spark.report.row_parts import cut


def cascade_part(facts: Mapping[str, Any] | None) -> str:
    """Return the certificates' sentences, and what the sampled rows show; nothing without a cascade."""
    if facts is None:
        return ""
    parts = [
        "<h2>The cascade</h2>",
        f"<p>{escape(str(facts['sentence']))}</p>",
        facts_list(cascade_facts(facts)),
    ]
    for name, of_answer in facts.get("questions", {"": facts}).items():
        parts += _sampled_rows(of_answer, f"{name}: " if name else "")
    return "".join(parts)


def _sampled_rows(facts: Mapping[str, Any], whose: str) -> list[str]:
    """Return what the sampled rows show of one answer; ``whose`` begins the headings."""
    parts = []
    if labels := facts.get("labels"):
        parts += [
            f"<h3>{escape(whose)}Agreement of sampled rows by the small model's answer</h3>",
            "<p class='soft'>An estimate that describes; the promise is about the whole column.</p>",
            _shares("answer", [(cut(one["label"]), one) for one in labels]),
        ]
    if tenths := facts.get("tenths"):
        parts += [
            f"<h3>{escape(whose)}Agreement of sampled rows by tenths, as the large model answered them</h3>",
            _shares("tenth", [(f"{number}", one) for number, one in enumerate(tenths, 1)]),
        ]
    if rows_apart := facts.get("disagreements"):
        rows = [(f"{one['score']:.3f}", cut(one["small"]), cut(one["large"])) for one in rows_apart]
        parts += [
            f"<h3>{escape(whose)}Sampled rows that differ, the surest first</h3>",
            numbers_table(("score", "small", "large"), rows),
        ]
    return parts


def _shares(name: str, groups: list[tuple[str, Mapping[str, int]]]) -> str:
    rows = [
        (group, f"{one['sampled']:,}", share_text(one["agreeing"], one["sampled"])) for group, one in groups
    ]
    return numbers_table((name, "sampled", "agree"), rows)
