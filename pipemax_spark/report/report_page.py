"""Make the page of a run: one HTML file with everything in it, for a browser, a mail or MLflow.

It begins with what the run has done: rows, answers, errors, time and cost, and what the output's last runs have done;
then come some rows, where the answers are wrong, how they are distributed, and where the engines' time went. What there
is nothing to say of is left out. It loads nothing from elsewhere and runs no script. It knows nothing of how the
engines' charts were drawn.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from html import escape

from pipemax_spark.report.cascade_part import cascade_part
from pipemax_spark.report.page_parts import (
    STYLE,
    breakable,
    duration,
    facts,
    numbers_table,
    text_block,
    tiles,
)
from pipemax_spark.report.past_runs import PastRun
from pipemax_spark.report.quality_parts import accuracy_part, distributions_part, drift_part
from pipemax_spark.report.row_parts import row_part
from pipemax_spark.report.sampled_rows import SampledRow
from pipemax_spark.report.summary import Findings, Summary, counted, facts_of, token_rate
from pipemax_spark.request.prices import Prices

_CHARTS = {
    "rows": "Rows per second, each engine",
    "tokens": "Generated tokens per second, each engine",
    "kv": "KV use over the engine's phases",
    "steps": "Step times, predicted against measured",
}
_PARTS = {
    "start_up": (
        "start-up",
        "#8c8c8c",
        "Use one large job, not many small ones; put the weights on a local disk.",
    ),
    "waiting_for_input": (
        "waiting for input",
        "#d62728",
        "Give executors more task slots (spark.executor.cores), and put less work before the job.",
    ),
    "prefill": ("prefill", "#e6842a", "Shorten the template, and put the text that all prompts share first."),
    "decode": (
        "decode",
        "#137b80",
        "This is the work itself: --max-tokens, a schema or stop strings shorten it.",
    ),
    "mixed": ("prefill and decode", "#8e6c8a", "This is the work itself."),
    "prefetch_stall": ("prefetch stall", "#b22222", "Raise num_batches by one in the engine config."),
    "drain": ("drain", "#c49c94", "Use larger tables for each job: at its end the longest answers are left."),
    "no_engine": ("no engine", "#bbbbbb", "Spark's own start and the last commit: nothing to change."),
}
"""Part of the time account → its name, its colour, and what to change if it is large."""
_LARGE_SHARE = 0.1
_SMALL_SHARE = 0.0005


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """What a run was, for the head of its page."""

    run_id: str
    input: str
    """The table with its version, if it has one."""
    prompt: str
    """The template, or the column that holds the prompt."""
    system: str | None = None
    model: str
    versions: str
    """Names and versions of what ran."""
    started: datetime
    ended: datetime
    """With a time zone, as ``started``."""
    stopped_by: str | None = None
    """Why the run was stopped; its page shows what it had committed until then."""


def report_page(
    run: RunFacts,
    summary: Summary,
    findings: Findings,
    places: Mapping[str, str],
    charts: Mapping[str, str],
    *,
    prices: Prices,
) -> str:
    """Return the page. ``charts`` are SVG texts by name; a chart that is missing is left out."""
    all_facts = [*facts_of(summary, findings, prices), *places.items(), ("Run", run.run_id)]
    parts = [
        f"<!doctype html><html lang='en'><head><meta charset='utf-8'><title>PipeMax run {escape(run.run_id)}</title>",
        "<meta name='viewport' content='width=device-width, initial-scale=1'>",
        f"<link rel='icon' href='data:,'><style>{STYLE}</style></head><body>",
        f"<h1>{counted(summary.rows_out, 'row')} in {duration(summary.seconds)}</h1>",
        f"<div>{breakable(summary.output)}</div>",
        "" if run.stopped_by is None else text_block("The run was stopped", run.stopped_by, is_bad=True),
        _tiles(summary, findings, prices),
        _about(run),
        _errors(findings),
        drift_part(findings.drift),
        cascade_part(summary.cascade),
        _past_runs(findings.past_runs, run.run_id),
        _sample(findings.sample, summary),
        *map(accuracy_part, findings.accuracies),
        distributions_part(findings.distributions),
        _engines(summary, charts),
        "<h2>All facts</h2>",
        facts((name.strip(), text) for name, text in all_facts),
        "</body></html>\n",
    ]
    return "\n".join(part for part in parts if part)


def _tiles(summary: Summary, findings: Findings, prices: Prices) -> str:
    answers = summary.rows_out - summary.rows_error
    shown = [
        (f"{summary.rows_out:,}", "rows"),
        (f"{answers:,}", "answers"),
        (f"{summary.rows_error:,}", "error rows"),
    ]
    for accuracy in findings.accuracies:
        if accuracy.rows:
            of_question = "" if accuracy.question is None else f"{accuracy.question}: "
            rows = counted(accuracy.rows, "row")  # the output's, with those of earlier runs
            agree = f"{of_question}of {rows} agree with column {accuracy.column!r}"
            shown.append((f"{accuracy.right / accuracy.rows:.1%}", agree))
    shown.append((duration(summary.seconds), "from the first chunk on"))
    if prices.are_known:
        shown.append((f"{prices.cost(seconds=summary.seconds, spent=summary.spent):,.2f}", "cost"))
    if summary.rows_left:
        shown.append((f"{summary.rows_left:,}", "rows left"))
    return tiles(shown)


def _about(run: RunFacts) -> str:
    named = [("Input", run.input), ("Prompt", run.prompt)]
    if run.system:
        named.append(("System message", run.system))
    took_s = (run.ended - run.started).total_seconds()  # with what came before the first chunk
    named += [
        ("Model", run.model),
        ("Versions", run.versions),
        ("Start", f"{run.started:%Y-%m-%d %H:%M:%S %Z}"),
        ("End", f"{run.ended:%Y-%m-%d %H:%M:%S %Z}, {duration(took_s)} later"),
    ]
    return facts(named)


def _errors(findings: Findings) -> str:
    if not findings.errors:
        return ""
    parts = ["<h2>Errors</h2>"]
    for code, (rows, message) in findings.errors.items():
        parts.append(f"<h3 class='bad'>{escape(code)}: {counted(rows, 'row')}</h3>")
        examples = findings.error_rows.get(code, ())
        parts += map(row_part, examples)
        if message and not examples:
            parts.append(text_block("an example", message, is_bad=True))
    return "".join(parts)


def _past_runs(runs: Sequence[PastRun], run_id: str) -> str:
    if not runs:
        return ""
    head = ("start, UTC", "rows", "errors", "of rows", "time", "rows/s", "read per row", "generated per row")
    rows = [
        (
            f"{run.started:%Y-%m-%d %H:%M}",
            f"{run.rows:,}",
            f"{run.rows_error:,}",
            f"{run.rows_error / run.rows:.1%}",
            duration(run.seconds),
            f"{run.rows / run.seconds:,.1f}" if run.seconds else "",
            f"{run.prompt_tokens / run.rows_answered:,.1f}" if run.rows_answered else "",
            f"{run.completion_tokens / run.rows_answered:,.1f}" if run.rows_answered else "",
        )
        for run in runs
    ]
    here = next((number for number, run in enumerate(runs) if run.run_id == run_id), None)
    less_important = ("of rows", "rows/s", "read per row", "generated per row")
    return (
        "<h2>The last runs</h2>"
        + numbers_table(head, rows, less_important=less_important, bold_row=here)
        + "<p class='soft'>Rows that the output holds of each run. Time is from the run's start to its last answer; "
        "tokens are per answered row.</p>"
    )


def _sample(sample: Sequence[SampledRow], summary: Summary) -> str:
    if not sample:
        return ""
    answers = summary.rows_out - summary.rows_error
    title = "All rows with answers" if len(sample) >= answers else f"{len(sample)} of the rows with answers"
    note = (
        "" if len(sample) >= answers else "<p class='soft'>The first of the table, not drawn at random.</p>"
    )
    return f"<h2>{title}</h2>{note}{''.join(map(row_part, sample))}"


def _engines(summary: Summary, charts: Mapping[str, str]) -> str:
    account = _time_account(summary.time_account_s)
    drawn = "".join(
        f"<h3>{escape(title)}</h3><div class='chart wide scroll'>{charts[name]}</div>"
        for name, title in _CHARTS.items()
        if name in charts
    )
    if not account and not drawn:
        return ""
    rates = tiles(
        [
            (f"{summary.engines}", "engine" if summary.engines == 1 else "engines"),
            (f"{summary.rows_per_s:,.1f}", "rows/s with start-up"),
            (f"{summary.working_rows_per_s:,.1f}", "rows/s at work"),
            token_rate(summary),
        ]
    )
    return f"<h2>Where the engines' time went</h2>{rates}{account}{_policies(summary)}{drawn}"


def _time_account(account: Mapping[str, float]) -> str:
    total_s = sum(account.values())
    if total_s <= 0:
        return ""
    bar, rows, changes = [], [], []
    for part, seconds in account.items():
        name, color, change = _PARTS.get(part, (part.replace("_", " "), "#999999", ""))
        share = seconds / total_s
        if share < _SMALL_SHARE:
            continue
        bar.append(
            f"<div style='width:{share:.2%};background:{color}' title='{escape(name)} {share:.1%}'></div>"
        )
        rows.append(
            f"<tr><td class='part'><span class='key' style='background:{color}'></span>{escape(name)}</td>"
            f"<td class='n'>{share:.1%}</td><td class='n'>{escape(duration(seconds))}</td></tr>"
        )
        if change and share >= _LARGE_SHARE:
            changes.append((name, change))
    head = "<tr><th></th><th class='n'>share</th><th class='n'>time</th></tr>"
    advice = f"<h3>What to change</h3>{facts(changes)}" if changes else ""
    return f"<div class='bar'>{''.join(bar)}</div><table>{head}{''.join(rows)}</table>{advice}"


def _policies(summary: Summary) -> str:
    named = [(str(policy.get("chosen", "")), str(policy.get("reason", ""))) for policy in summary.policies]
    named += [("tuned", line.removeprefix("Tuned: ")) for line in summary.tunings]
    return f"<h3>Policy</h3>{facts(named)}" if named else ""
