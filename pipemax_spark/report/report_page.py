"""Make the page of a run: one HTML file with everything in it, for a browser, a mail or MLflow.

It shows the facts of the printed report, the time account as a bar with what to change, the charts, errors by code
and a sample of rows. It loads nothing from elsewhere and runs no script. It knows nothing of how the charts were drawn.
"""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from pipemax_spark.report.summary import Findings, Summary, facts_of, token_rate

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
    "no_engine": ("no engine", "#dddddd", "Spark's own start and the last commit: nothing to change."),
}
"""Part of the time account → its name, its colour, and what to change if it is large."""
_LARGE_SHARE = 0.1
_STYLE = """
:root { color-scheme: light; }
body { font: 15px/1.5 system-ui, sans-serif; color: #222; background: #fff; }
body { margin: 0 auto; max-width: 62rem; padding: 1rem; }
h1 { font-size: 1.4rem; margin: 0.2rem 0; } h2 { font-size: 1.05rem; margin: 1.6rem 0 0.4rem; }
.tiles { display: flex; flex-wrap: wrap; gap: 0.6rem; margin: 0.8rem 0; }
.tile { border: 1px solid #ddd; border-radius: 6px; padding: 0.4rem 0.8rem; }
.tile b { display: block; font-size: 1.25rem; } .tile span { color: #666; font-size: 0.85rem; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; } td, th { text-align: left; vertical-align: top; }
td, th { border-bottom: 1px solid #e5e5e5; padding: 0.2rem 0.8rem 0.2rem 0; } td { overflow-wrap: anywhere; }
td.n { white-space: nowrap; } .bar { display: flex; height: 1.6rem; border-radius: 4px; overflow: hidden; }
.key { display: inline-block; width: 0.8rem; height: 0.8rem; border-radius: 2px; margin-right: 0.4rem; }
.chart svg { width: 100%; height: auto; } .warning { background: #fff3cd; border-radius: 6px; padding: 0.5rem 0.8rem; }
"""


def report_page(
    summary: Summary,
    findings: Findings,
    places: Mapping[str, str],
    charts: Mapping[str, str],
    *,
    run_id: str,
    price_per_hour: float | None,
) -> str:
    """Return the page. ``charts`` are SVG texts by name; a chart that is missing is left out."""
    title = f"PipeMax run {run_id}"
    parts = [
        f"<!doctype html><html lang='en'><head><meta charset='utf-8'><title>{escape(title)}</title>",
        "<meta name='viewport' content='width=device-width, initial-scale=1'>",
        f"<link rel='icon' href='data:,'><style>{_STYLE}</style></head><body>",
        f"<h1>{escape(title)}</h1><div>{escape(summary.output)}</div>",
        _tiles(summary, price_per_hour),
        _time_account(summary.time_account_s),
        *(
            f"<h2>{escape(title)}</h2><div class='chart'>{charts[name]}</div>"
            for name, title in _CHARTS.items()
            if name in charts
        ),
        _errors(findings),
        _policies(summary.policies),
        _sample(findings.sample),
        "<h2>All facts</h2>",
        _table(
            [
                (name.strip(), value)
                for name, value in [*facts_of(summary, findings, price_per_hour), *places.items()]
            ]
        ),
        "</body></html>\n",
    ]
    return "\n".join(part for part in parts if part)


def _tiles(summary: Summary, price_per_hour: float | None) -> str:
    tiles = [
        (f"{summary.rows_out:,}", "rows out"),
        (f"{summary.rows_error:,}", "error rows"),
        (f"{summary.rows_per_s:,.1f}", "rows/s with start-up"),
        (f"{summary.working_rows_per_s:,.1f}", "rows/s at work"),
        token_rate(summary),
        (_duration(summary.seconds), "from the first chunk on"),
        (f"{summary.engines}", "engines" if summary.engines != 1 else "engine"),
    ]
    if price_per_hour is not None:
        tiles.append((f"{summary.seconds / 3600 * price_per_hour:,.2f}", "cost"))
    made = (
        f"<div class='tile'><b>{escape(value)}</b><span>{escape(name)}</span></div>" for value, name in tiles
    )
    return f"<div class='tiles'>{''.join(made)}</div>"


def _time_account(account: Mapping[str, float]) -> str:
    total_s = sum(account.values())
    if total_s <= 0:
        return ""
    bar, rows = [], []
    for part, seconds in account.items():
        name, color, change = _PARTS.get(part, (part.replace("_", " "), "#999999", ""))
        share = seconds / total_s
        if share < 0.0005:
            continue
        bar.append(
            f"<div style='width:{share:.2%};background:{color}' title='{escape(name)} {share:.1%}'></div>"
        )
        rows.append(
            f"<tr><td class='n'><span class='key' style='background:{color}'></span>{escape(name)}</td>"
            f"<td class='n'>{share:.1%}</td><td class='n'>{escape(_duration(seconds))}</td>"
            f"<td>{escape(change if share >= _LARGE_SHARE else '')}</td></tr>"
        )
    head = "<tr><th></th><th>share</th><th>time of all engines</th><th>what to change</th></tr>"
    return (
        f"<h2>Where the engines' time went</h2><div class='bar'>{''.join(bar)}</div>"
        f"<div class='scroll'><table>{head}{''.join(rows)}</table></div>"
    )


def _errors(findings: Findings) -> str:
    if not findings.errors:
        return ""
    rows = [(code, f"{rows:,}", message) for code, (rows, message) in findings.errors.items()]
    return "<h2>Errors</h2>" + _table(rows, head=("code", "rows", "an example"))


def _policies(policies: Sequence[Mapping[str, Any]]) -> str:
    if not policies:
        return ""
    rows = [(str(policy.get("chosen", "")), str(policy.get("reason", ""))) for policy in policies]
    return "<h2>Policy</h2>" + _table(rows)


def _sample(sample: Sequence[Mapping[str, Any]]) -> str:
    if not sample:
        return ""
    names = list(sample[0])
    return "<h2>Some rows</h2>" + _table(
        [tuple(_text(row[name]) for name in names) for row in sample], head=names
    )


def _table(rows: Sequence[Sequence[str]], *, head: Sequence[str] = ()) -> str:
    top = "".join(f"<th>{escape(name)}</th>" for name in head)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<div class='scroll'><table>{f'<tr>{top}</tr>' if top else ''}{body}</table></div>"


def _text(value: object) -> str:
    text = "" if value is None else str(value)
    return text if len(text) <= 300 else text[:299] + "…"


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.1f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60:02d} min"
