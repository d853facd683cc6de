"""Show on a page how good the answers of a run are: how they are distributed, and where they are wrong, as HTML."""

from collections.abc import Iterable, Mapping
from html import escape

from pipemax_spark.report.accuracy import ERROR, OTHER, Accuracy, Confusions
from pipemax_spark.report.charts import histogram
from pipemax_spark.report.distributions import Choices, Distributions, Lengths
from pipemax_spark.report.drift import Drift
from pipemax_spark.report.page_parts import breakable, facts, numbers_table, share_bar
from pipemax_spark.report.quality import AnswerQuality
from pipemax_spark.report.row_parts import cut, row_part
from pipemax_spark.rows.annotated import ANNOTATION

_MOST_CHOICES = 20
_MOST_BINS = 30


def accuracy_part(accuracy: Accuracy) -> str:
    """Return how far answers agree with a column of right answers, and the rows where they do not."""
    if not accuracy.rows:
        return ""
    of_question = "" if accuracy.question is None else f" of {accuracy.question!r}"
    parts = [
        f"<h2>{escape(f'How right the answers{of_question} are')}</h2>",
        facts((name.strip(), text) for name, text in accuracy.facts()),
    ]
    if accuracy.confusions is not None:
        parts.append(_matrix(accuracy.confusions))
    if accuracy.worst_rows:
        sure = any(answer.probability is not None for row in accuracy.worst_rows for answer in row.answers)
        order = "those first of which the model was the surest" if sure else "in the order of the ids"
        parts += ["<h3>Wrong answers</h3>", f"<p class='soft'>At most ten, {order}.</p>"]
        parts += map(row_part, accuracy.worst_rows)
    return "".join(parts)


def drift_part(drift: Drift | None) -> str:
    """Return how the rows of a canary compare with an earlier run; nothing without a canary."""
    if drift is None:
        return ""
    moved = {comparison.name for comparison in drift.moved}
    tables = []
    for comparison in drift.comparisons:
        rows = [
            (cut(group), f"{before:.1%}", f"{now:.1%}")
            for group, before, now in comparison.changes()[:_MOST_CHOICES]
        ]
        verdict = "has changed" if comparison.name in moved else "no change shown"
        chance = f"{verdict}; a difference like this one by chance alone: {comparison.p_value:.2g}"
        tables.append(
            f"<h3{' class=bad' if comparison.name in moved else ''}>{escape(comparison.name)}</h3>"
            f"<p class='soft'>{escape(chance)}</p>{numbers_table(('', 'earlier run', 'now'), rows)}"
        )
    return f"<h2>The canary</h2><p>{escape(str(drift))}</p>{''.join(tables)}"


def _matrix(confusions: Confusions) -> str:
    """Return a table with a row for each right answer and a column for each class that was answered."""
    classes, extra = confusions.classes, (OTHER, ERROR)
    shown = [
        *classes,
        *(name for name, rows in zip(extra, (confusions.others, confusions.errors), strict=True) if rows),
    ]
    head = "".join(
        f"<th class='n'>{escape(cut(name))}</th>" for name in (*shown, "rows", "recall", "precision")
    )
    lines = []
    for gold in classes:
        counts = dict(zip((*classes, *extra), confusions.counts(gold), strict=True))
        total, precision = sum(counts.values()), confusions.precision(gold)
        cells = "".join(_cell(counts[name], total, is_right=name == gold) for name in shown)
        figures = (
            f"{total:,}",
            f"{confusions.recall(gold):.1%}",
            "" if precision is None else f"{precision:.1%}",
        )
        rest = "".join(f"<td class='n'>{text}</td>" for text in figures)
        lines.append(f"<tr><td class='part'>{escape(cut(gold))}</td>{cells}{rest}</tr>")
    return (
        "<h3>Answers by the right answer</h3><p class='soft'>A line for each right answer, a column for each answer. "
        "Recall is the share of a line's rows that were answered so; precision the share of the answers of that class "
        "that are right.</p>"
        f"<div class='scroll'><table><tr><th></th>{head}</tr>{''.join(lines)}</table></div>"
    )


def _cell(rows: int, total: int, *, is_right: bool) -> str:
    color = "--bar" if is_right else "--bad"
    shade = f"background:color-mix(in srgb,var({color}) {60 * rows / total:.0f}%,transparent)"
    return f"<td class='n' style='{shade}'>{f'{rows:,}' if rows else ''}</td>"


def distributions_part(distributions: Distributions) -> str:
    """Return choices, probabilities, agreement and lengths."""
    charts = [*map(_probabilities, distributions.quality), *map(_lengths, distributions.lengths)]
    lists = [*map(_choices, distributions.choices), *map(_quality, distributions.quality)]
    if not any((*charts, *lists)):
        return ""
    return (
        "<h2>How the answers are distributed</h2>"
        + "".join(lists)
        + (f"<div class='charts'>{''.join(charts)}</div>" if any(charts) else "")
    )


def _choices(choices: Choices) -> str:
    shown, left, rows_left = choices.first(_MOST_CHOICES)
    names = {breakable(cut(choice)): rows for choice, rows in shown.items()}
    if left:
        names[f"<span class='soft'>{left:,} others</span>"] = rows_left
    return f"<h3>{escape(choices.name)}</h3>{_bars(names, sum(choices.rows.values()))}"


def _bars(rows_by_name: Mapping[str, int], total: int) -> str:
    """Return a table of counts, shares and bars. The names are HTML."""
    highest = max(rows_by_name.values())
    rows = "".join(
        f"<tr><td>{name}</td><td class='n'>{rows:,}</td><td class='n'>{rows / total:.1%}</td>"
        f"<td>{share_bar(rows / highest)}</td></tr>"
        for name, rows in rows_by_name.items()
    )
    return f"<table>{rows}</table>"


def _probabilities(quality: AnswerQuality) -> str:
    if not quality.percents:
        return ""
    title = _titled(f"Probability of the answers{_of(quality)}", [dict(quality.facts())["Probability"]])
    chart = histogram("probability of the answer, %", quality.bins())
    return f"<div>{title}<div class='chart'>{chart}</div></div>"


def _quality(quality: AnswerQuality) -> str:
    """Return the agreement in one column of answers, and its invalid answers."""
    named, parts = dict(quality.facts()), []
    if quality.agreements:
        parts.append(_titled(f"Agreement of the samples{_of(quality)}", [named["Agreement"]]))
        shares = {f"{share:.0%}": rows for share, rows in quality.agreements.items()}
        parts.append(_bars(shares, sum(shares.values())))
    rest = [f"{name}: {text}" for name, text in named.items() if name not in ("Probability", "Agreement")]
    if rest:
        parts.append(_titled(f"Invalid answers{_of(quality)}", rest))
    return "".join(parts)


def _of(quality: AnswerQuality) -> str:
    return "" if quality.name == ANNOTATION else f" of {quality.name!r}"


def _titled(title: str, texts: Iterable[str]) -> str:
    return f"<h3>{escape(title)}</h3>{''.join(f'<p>{escape(text)}</p>' for text in texts)}"


def _lengths(lengths: Lengths) -> str:
    low, high = min(lengths.rows), max(lengths.rows)
    if low == high:
        text = f"{low:,} in each row"
    else:
        text = f"median {lengths.quantile(0.5):,}, 95 % of the rows up to {lengths.quantile(0.95):,}, at most {high:,}"
    bins = lengths.bins(_MOST_BINS)
    chart = f"<div class='chart'>{histogram(lengths.name, bins)}</div>" if len(bins) > 1 else ""
    return f"<div><h3>{escape(lengths.name.capitalize())}</h3><p>{escape(text)}</p>{chart}</div>"
