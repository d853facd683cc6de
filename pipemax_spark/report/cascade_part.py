"""Show on a page what a cascade has certified, and where the two models disagree, as HTML."""

from collections.abc import Mapping
from html import escape
from typing import Any

from pipemax_spark.report.page_parts import numbers_table
from pipemax_spark.report.row_parts import cut


def cascade_part(facts: Mapping[str, Any] | None) -> str:
    """Return the certificate's sentence, and what the sampled rows show; nothing without a cascade."""
    if facts is None:
        return ""
    parts = ["<h2>The cascade</h2>", f"<p>{escape(str(facts['sentence']))}</p>"]
    models = ("small model", cut(facts["small_model"])), ("large model", cut(facts["large_model"]))
    parts.append(f"<p class='soft'>{escape('; '.join(f'{name}: {model}' for name, model in models))}</p>")
    if labels := facts.get("labels"):
        rows = [
            (cut(one["label"]), f"{one['sampled']:,}", f"{one['agreeing'] / one['sampled']:.1%}")
            for one in labels
        ]
        parts += [
            "<h3>Agreement of sampled rows by the small model's answer</h3>",
            "<p class='soft'>An estimate that describes; the promise is about the whole column.</p>",
            numbers_table(("answer", "sampled", "agree"), rows),
        ]
    if rows_apart := facts.get("disagreements"):
        rows = [(f"{one['score']:.3f}", cut(one["small"]), cut(one["large"])) for one in rows_apart]
        parts += [
            "<h3>Sampled rows that differ, the surest first</h3>",
            numbers_table(("score", "small", "large"), rows),
        ]
    return "".join(parts)
