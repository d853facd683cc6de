"""What a person sees at the end of a job, the summary for programs, and the picture of the run."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from pipemax_spark.progress import Sample

_TEXT_WIDTH = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """``--summary``: exactly these keys."""

    rows_in: int
    rows_out: int
    """Rows of this run in the output, error rows included."""
    rows_error: int
    rows_skipped: int
    """Done by earlier runs."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    seconds: float = 0.0
    rows_per_s: float = 0.0
    tokens_per_s: float = 0.0
    output: str
    mlflow_run_id: str | None = None
    engines: int = 0

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self), indent=2) + "\n")


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """What the committed table shows beyond the summary."""

    errors: dict[str, tuple[int, str]] = field(default_factory=dict)
    """Code → (rows, an example's message)."""
    sample: Sequence[dict[str, Any]] = ()
    accuracy: tuple[str, float, int] | None = None
    """(gold column, share right, rows compared)."""


def print_report(
    console: Console,
    summary: Summary,
    findings: Findings,
    places: dict[str, str],
    *,
    price_per_hour: float | None,
) -> None:
    if findings.sample:
        console.print()
        console.print(_sample_table(findings.sample))
    facts = Table(show_header=False, box=None, pad_edge=False)
    facts.add_row("Rows in", f"{summary.rows_in:,}")
    facts.add_row("Rows annotated", f"{summary.rows_out:,}")
    facts.add_row("  with errors", f"{summary.rows_error:,}")
    for code, (count, message) in findings.errors.items():
        facts.add_row(f"    {code}", f"{count:,}, such as: {message}")
    if summary.rows_skipped:
        facts.add_row("Done before", f"{summary.rows_skipped:,}")
    if findings.accuracy is not None:
        column, share, rows = findings.accuracy
        facts.add_row("Accuracy", f"{share:.1%} of {rows:,} rows agree with column {column!r}")
    facts.add_row("Tokens", f"{summary.prompt_tokens:,} read, {summary.completion_tokens:,} written")
    facts.add_row(
        "Time", f"{summary.seconds:.1f} s, engine start included: {summary.rows_per_s:,.1f} rows/s, "
        f"{summary.tokens_per_s:,.0f} tokens/s on {summary.engines} engine(s)",
    )  # fmt: skip
    if price_per_hour is not None:
        facts.add_row("Cost", f"{summary.seconds / 3600 * price_per_hour:.2f} at {price_per_hour} an hour")
    for name, place in places.items():
        facts.add_row(name, place)
    console.print()
    console.print(facts)


def _sample_table(sample: Sequence[dict[str, Any]]) -> Table:
    table = Table(title=f"{len(sample)} annotated rows", title_justify="left", show_lines=False)
    names = list(sample[0])
    for name in names:
        table.add_column(name, overflow="fold", max_width=_TEXT_WIDTH)
    for row in sample:
        table.add_row(*(Text(_short(row[name])) for name in names))
    return table


def _short(value: Any) -> str:
    text = " ".join(str(value).split())
    return text if len(text) <= _TEXT_WIDTH else text[: _TEXT_WIDTH - 1] + "…"


def plot(samples: Sequence[Sample], path: Path) -> None:
    """Rows and tokens per second, and requests with KV use, over the run's time."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    seconds = [sample.seconds for sample in samples]
    figure, (rates, requests) = plt.subplots(2, 1, sharex=True, figsize=(9, 6), layout="constrained")
    rates.plot(seconds, [sample.rows_per_s for sample in samples], color="tab:blue", label="rows/s")
    rates.set_ylabel("rows/s")
    tokens = rates.twinx()
    tokens.plot(seconds, [sample.tokens_per_s for sample in samples], color="tab:orange", label="tokens/s")
    tokens.set_ylabel("tokens/s")
    rates.set_title("Throughput (mean of the last 30 s)")
    handles = [*rates.get_lines(), *tokens.get_lines()]
    rates.legend(handles, [str(line.get_label()) for line in handles], loc="upper left")
    requests.stackplot(
        seconds,
        [sample.running_requests for sample in samples],
        [sample.waiting_requests for sample in samples],
        labels=["running", "waiting"],
        alpha=0.7,
    )
    requests.set_ylabel("requests in the engines")
    requests.set_xlabel("seconds")
    kv = requests.twinx()
    kv.plot(seconds, [100 * sample.kv_usage for sample in samples], color="black", linewidth=0.8)
    kv.set_ylabel("KV cache in use, %")
    kv.set_ylim(0, 100)
    requests.legend(loc="upper left")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)
