"""Build the report for people at the end of a job, and the summary for programs."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from html import escape
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from pipemax.wire import Spent
from pipemax_spark.report.accuracy import Accuracy
from pipemax_spark.report.cascade_texts import cascade_facts
from pipemax_spark.report.distributions import Distributions
from pipemax_spark.report.drift import Drift
from pipemax_spark.report.engine_rates import describe_engine, describe_replica
from pipemax_spark.report.past_runs import PastRun
from pipemax_spark.report.sampled_rows import SampledAnswer, SampledRow
from pipemax_spark.report.time_accounts import describe_account, working_seconds
from pipemax_spark.request.error_limits import such_as
from pipemax_spark.request.prices import Prices
from pipemax_spark.rows.annotated import ANNOTATION

_TEXT_WIDTH = 60
_LABEL_WIDTH = 19
_SHOWN_ENGINES, _SHOWN_ROWS = 16, 5
_LOOKED_AT_RUNS = 20
SUMMARY_FILE = "summary.json"
"""The summary's name in a run's directory."""
_TOLD_DRAIN = 0.05
"""Share of the engines' time from which on the drain has a line of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The totals that ``--summary`` writes, with exactly these keys."""

    complete: bool = False
    """Whether each row of the input, or with ``--incremental`` of what was appended, is in the output with an answer or
    an error."""
    rows_left: int | None = None
    """Rows that are not in the output yet; None if the run ended before it knew."""
    ended_by: str | None = None
    """What ended the run, a value of ``EndedBy``; None while it works, and if it was killed."""
    rows_in: int
    """Rows of the input; 0 if the run ended before it had counted them."""
    rows_out: int = 0
    """Rows that this run has added to the output, including error rows."""
    rows_error: int = 0
    """Rows of ``rows_out`` with an error."""
    rows_skipped: int = 0
    """Rows that earlier runs have completed."""
    rows_left_out: int = 0
    """Rows that ``--limit`` leaves for a later run."""
    rows_deleted: int = 0
    """Rows of the output that ``--on-delete`` has marked or removed, because the input has deleted theirs."""
    rows_from_table: int = 0
    """Rows that took the answer of a row in the table of ``--reuse``; they are among ``rows_skipped``."""
    tokens_from_table: int = 0
    """Tokens of these answers and their prompts, which were not computed."""
    rows_reused: int = 0
    """Rows, or with ``--ask`` answers, that took the answer of an equal request, as far as the engines reported it."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int | None = None
    """Tokens of ``completion_tokens`` that thinking took; None if the engine splits none off."""
    endpoint_requests: int | None = None
    """Requests to an endpoint, also for rows whose task has died, as far as engines reported them; None without one."""
    endpoint_retries: int | None = None
    """Requests of these that were tries of an earlier one."""
    billed_prompt_tokens: int | None = None
    """Tokens that the endpoint says it has used, over all samples, attempts and rows that were done twice."""
    billed_output_tokens: int | None = None
    rows_retried: int | None = None
    """Rows that took more than one attempt; None without ``--attempts``."""
    extra_attempts: int | None = None
    """Attempts beyond the first of all rows; None without ``--attempts``."""
    seconds: float = 0.0
    """Time from the first chunk's start to the last one's commit, including the rest of the engines' start."""
    rows_per_s: float = 0.0
    """``rows_out`` divided by ``seconds``."""
    tokens_per_s: float = 0.0
    """``completion_tokens`` divided by ``seconds``."""
    working_rows_per_s: float = 0.0
    """``rows_out`` divided by ``seconds`` without the engines' start and the time without an engine: the rate of a long
    run. 0 without rows."""
    output: str
    output_format: str = "Delta"
    """``Delta`` or ``Iceberg``."""
    mlflow_run_id: str | None = None
    engines: int = 0
    """Engine servers that have done rows of this run."""
    prefix_cache_hit_rate: float | None = None
    """Share of the prompts' tokens that the engines found in their KV cache, since their start."""
    policies: Sequence[Mapping[str, Any]] = ()
    """The engines' policies, with an entry for each different choice: ``chosen``, ``reason``,
    ``predicted_tokens_per_s`` by policy, ``inputs``."""
    tunings: Sequence[str] = ()
    """What the tunings of engines came to, a line each."""
    time_account_s: dict[str, float] = field(default_factory=dict)
    """Where the engines' time went: part → seconds over all engines, which add up to ``seconds`` for each."""
    replicas: Sequence[Mapping[str, Any]] = ()
    """What each replica of an engine did, as far as it was reported: ``host``, ``replica``, ``gpus``, ``state``,
    ``rows_done``, ``prompt_tokens``, ``completion_tokens``, ``restarts``, ``seconds``; empty for engines without
    replicas."""
    engine_rates: Sequence[Mapping[str, Any]] = ()
    """How fast each engine was, as far as it was reported, the slowest first: ``host``, ``gpus``, ``rows_done``,
    ``completion_tokens``, ``tokens_per_s``, ``rows_per_s``, and the ``machine_faults`` that it died of."""
    drain_at_full_rate_s: float | None = None
    """How long the output tokens of the drain would have taken at the rate of all others, summed over the engines: at
    most the drain's seconds.
    What ``time_account_s`` has for the drain beyond that is what the table's end cost. None if no engine tells it."""

    canary: Mapping[str, Any] | None = None
    """What the comparison of ``--canary`` came to: ``rows``, ``earlier_run``, ``earlier_rows``, the distributions that
    have ``moved``, and the ``smallest_p_value``; None if there was none."""
    cascade: Mapping[str, Any] | None = None
    """What the certificate of ``--cascade`` says: its ``sentence`` and ``certificate``, ``rows``, ``rows_kept``,
    ``rows_sampled``, ``rows_pilot`` of a pilot, the two models, what the ``phases`` took, ``costs`` with and without
    the small model, and what the sampled rows show; with ``--ask`` the ``questions``' certificates by name. None
    without one."""
    length_correlation: float | None = None
    """The correlation of the logarithms of prompts' and answers' lengths, as engines under stock vLLM learned it in
    this run, or in an earlier one on the same output; None if none has. The next run orders its rows by it."""

    accuracies: Sequence[Mapping[str, Any]] = ()
    """How far the answers agree with ``--gold-column``, over all rows of the spec, with an entry for each column:
    ``question`` (null without questions), ``column``, ``rows``, ``right``, ``rows_error``, ``rows_without_gold``, and
    the share's interval at 95 %, ``low`` and ``high``."""

    @property
    def spent(self) -> Spent:
        """What an endpoint was asked; nothing without one."""
        return Spent(
            requests=self.endpoint_requests or 0,
            retries=self.endpoint_retries or 0,
            prompt_tokens=self.billed_prompt_tokens or 0,
            output_tokens=self.billed_output_tokens or 0,
        )

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2) + "\n"

    def __str__(self) -> str:
        """Return the facts of the report, a line each."""
        return "\n".join(f"{name:<{_LABEL_WIDTH}}{value}" for name, value in self._rows())

    def _repr_html_(self) -> str:
        """Return the same facts as a table: notebooks show it for a cell's value."""
        cells = (
            f"<tr><th style='text-align:left'>{escape(name.strip())}</th>"
            f"<td style='text-align:left'>{escape(value)}</td></tr>"
            for name, value in self._rows()
        )
        return f"<table>{''.join(cells)}</table>"

    def _rows(self) -> list[tuple[str, str]]:
        facts = facts_of(self, Findings(), Prices())
        return facts if self.mlflow_run_id is None else [*facts, ("MLflow run", self.mlflow_run_id)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """Results that the committed table shows beyond the summary."""

    errors: Mapping[str, tuple[int, str]] = field(default_factory=dict)
    """Code → (rows, an example's message, or no text to show none)."""
    error_rows: Mapping[str, Sequence[SampledRow]] = field(default_factory=dict)
    """Code → some of its rows."""
    sample: Sequence[SampledRow] = ()
    """Some rows with answers."""
    distributions: Distributions = field(default_factory=Distributions)
    past_runs: Sequence[PastRun] = ()
    """The last runs that the output holds rows of, this one among them, the latest first; empty for a first run."""
    accuracies: Sequence[Accuracy] = ()
    """One, or of each question that has a column of right answers."""
    drift: Drift | None = None
    advice: str | None = None
    """A change that would make the next run faster."""


def with_accuracies(summary: Summary, findings: Findings) -> Summary:
    """Return the summary with the accuracies that were found."""
    return replace(summary, accuracies=[accuracy.to_summary() for accuracy in findings.accuracies])


def print_report(
    console: Console,
    summary: Summary,
    findings: Findings,
    places: Mapping[str, str],
    *,
    prices: Prices,
    warnings: Sequence[str] = (),
) -> None:
    """Print the report. ``places`` says where things are: name → path or URL; ``warnings`` are its last lines."""
    error_rows = [row for rows in findings.error_rows.values() for row in rows]
    if shown := (findings.sample or error_rows)[:_SHOWN_ROWS]:
        console.print()
        console.print(_sample_table(shown))
    console.print()
    for name, value in [*facts_of(summary, findings, prices), *places.items()]:
        # Never wrapped, because people copy the paths.
        console.print(f"{name:<{_LABEL_WIDTH - 1}} {value}", markup=False, highlight=False, soft_wrap=True)
    for warning in warnings:
        text = f"Warning: {warning}"
        console.print(text, style="bold yellow", markup=False, highlight=False, soft_wrap=True)


def _not_computed(summary: Summary) -> str:
    parts = []
    if summary.rows_reused:
        parts.append(f"{summary.rows_reused:,}, which took the answer of a row with an equal request")
    if summary.rows_from_table and summary.cascade is None:
        parts.append(
            f"{summary.rows_from_table:,}, which took that of a row in the table of --reuse "
            f"({summary.tokens_from_table:,} tokens)"
        )
    return "; ".join(parts)


def _deleted(summary: Summary) -> list[tuple[str, str]]:
    rows = summary.rows_deleted
    return [("Deleted", f"{counted(rows, 'row')} of the output, which the input has no more")] if rows else []


def facts_of(summary: Summary, findings: Findings, prices: Prices) -> list[tuple[str, str]]:
    """Return the facts of the report in order: name and text. A name with leading blanks belongs to the one above."""
    took = f" in {summary.seconds:,.1f} s" if summary.rows_out else ""
    where = f"the {summary.output_format} table {summary.output}"
    facts = [("Done", f"{counted(summary.rows_out, 'row')}{took}; the answers are in {where}")]
    if summary.rows_in != summary.rows_out:
        earlier = f", {summary.rows_skipped:,} of them done earlier" if summary.rows_skipped else ""
        facts.append(("Rows in", f"{summary.rows_in:,}{earlier}"))
    if summary.rows_error:
        facts.append(("  with errors", f"{summary.rows_error:,}"))
    facts += [
        (f"    {code}", f"{rows:,}{such_as(message)}") for code, (rows, message) in findings.errors.items()
    ]
    if not_computed := _not_computed(summary):
        facts.append(("  not computed", not_computed))
    facts += [*_deleted(summary), *_still_to_do(summary), *_canary(findings)]
    if summary.cascade is not None:
        facts.append(("Cascade", str(summary.cascade["sentence"])))
        facts += [(f"  {name}", text) for name, text in cascade_facts(summary.cascade)]
    for accuracy in findings.accuracies:
        facts += accuracy.facts()
    facts += findings.distributions.facts()
    if summary.rows_out:
        thinking = (
            "" if summary.reasoning_tokens is None else f", {summary.reasoning_tokens:,} of them for thinking"
        )
        tokens = f"{summary.prompt_tokens:,} read, {summary.completion_tokens:,} generated{thinking}"
        if summary.prefix_cache_hit_rate is not None:
            tokens += f"; {summary.prefix_cache_hit_rate:.1%} of the prompts' were in the prefix cache"
        facts.append(("Tokens", tokens))
        if summary.endpoint_requests is not None:
            facts.append(("Endpoint", _endpoint(summary.spent)))
        if summary.rows_retried is not None:
            attempts = f"{summary.rows_retried:,} rows tried again, {summary.extra_attempts:,} extra attempts"
            facts.append(("Attempts", attempts))
        facts.append(
            (
                "Speed",
                f"{summary.rows_per_s:,.1f} rows/s, {' '.join(token_rate(summary))}, over "
                f"{summary.seconds:,.1f} s on {counted(summary.engines, 'engine')}, from the "
                f"start of the first chunk; {summary.working_rows_per_s:,.1f} rows/s at work",
            )
        )
    if findings.advice is not None:
        facts.append(("Worth a try", findings.advice))
    if summary.time_account_s:
        facts.append(("Engine time", describe_account(summary.time_account_s)))
        drain_s, total_s = summary.time_account_s.get("drain", 0.0), sum(summary.time_account_s.values())
        if summary.drain_at_full_rate_s is not None and drain_s >= _TOLD_DRAIN * total_s:
            facts.append(
                (
                    "Drain",
                    f"{drain_s / total_s:.1%} of the engines' time; at the rate before it, its tokens would have been "
                    f"{summary.drain_at_full_rate_s / total_s:.1%}",
                )
            )
    facts += _engines(summary)
    if prices.are_known and summary.rows_out:
        cost = prices.cost(seconds=summary.seconds, spent=summary.spent)
        # Of millions of rows, the engines' start is a small part.
        work_s = working_seconds(summary.time_account_s, seconds=summary.seconds)
        per_million = prices.cost(seconds=work_s, spent=summary.spent) / summary.rows_out * 1e6
        facts.append(("Cost", f"{cost:,.2f} at {prices}; at work, {per_million:,.2f} per million rows"))
    return facts


def _endpoint(spent: Spent) -> str:
    return (
        f"{counted(spent.requests, 'request')} ({spent.retries:,} again), {spent.prompt_tokens:,} prompt and "
        f"{spent.output_tokens:,} output tokens billed"
    )


def _canary(findings: Findings) -> list[tuple[str, str]]:
    return [] if findings.drift is None else [("Canary", str(findings.drift))]


def _still_to_do(summary: Summary) -> list[tuple[str, str]]:
    undone = (summary.rows_left or 0) - summary.rows_left_out
    reasons = {"left out by --limit": summary.rows_left_out, f"ended by {summary.ended_by}": undone}
    return [("Still to do", f"{rows:,} ({reason})") for reason, rows in reasons.items() if rows > 0]


def _engines(summary: Summary) -> list[tuple[str, str]]:
    """Return a fact for each engine, if there are several or one whose machine failed, and for each replica."""
    facts, rates = [], summary.engine_rates
    if len(rates) > 1 or any(entry["machine_faults"] for entry in rates):
        names = ["  slowest engine", *["  engine"] * len(rates)] if len(rates) > 1 else ["  engine"]
        facts += [
            (name, describe_engine(entry)) for name, entry in zip(names, rates[:_SHOWN_ENGINES], strict=False)
        ]
    facts += [
        (f"  replica {entry['replica']}", describe_replica(entry))
        for entry in summary.replicas[:_SHOWN_ENGINES]
    ]
    for name, shown in (("  engines", rates), ("  replicas", summary.replicas)):
        if len(shown) > _SHOWN_ENGINES:
            facts.append((name, f"{len(shown)} in all, in the summary file"))
    return facts


def earlier_length_correlation(runs: Path, output: str) -> float | None:
    """Return the ``length_correlation`` of the latest run on this output that has one in its summary under ``runs``.

    The run may have been under another spec: then the order of rows is a worse guess, and nothing else changes.
    """
    for path in sorted(runs.glob(f"*/{SUMMARY_FILE}"), reverse=True)[:_LOOKED_AT_RUNS]:
        try:
            summary = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):  # one that is being written, or deleted
            continue
        correlation: float | None = summary.get("length_correlation")
        if correlation is not None and summary.get("output") == output:
            return correlation
    return None


def counted(number: int, noun: str) -> str:
    """Return the number with its noun, in the plural unless it is 1."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _sample_table(sample: Sequence[SampledRow]) -> Table:
    table = Table(
        title=counted(len(sample), "annotated row"), title_justify="left", highlight=False, show_lines=False
    )
    shown = [
        dict(row.columns)
        | dict(row.truths)
        | {name: text for answer in row.answers for name, text in _cells(answer).items()}
        for row in sample
    ]
    names = list(dict.fromkeys(name for cells in shown for name in cells))
    for name in names:
        table.add_column(name, overflow="fold", max_width=_TEXT_WIDTH)
    for cells in shown:
        table.add_row(*(Text(_short(cells.get(name, ""))) for name in names))
    return table


def _cells(answer: SampledAnswer) -> dict[str, str]:
    text = "" if answer.answer is None else answer.answer.text
    cells = {answer.name: text if answer.error is None else f"({answer.error[0]})"}
    if answer.probability is not None:
        of_question = answer.name.rpartition(".")[0].removeprefix(ANNOTATION)
        cells[f"{of_question} probability".strip()] = f"{answer.probability:.2f}"
    return cells


def _short(value: str) -> str:
    text = " ".join(value.split())
    return text if len(text) <= _TEXT_WIDTH else text[: _TEXT_WIDTH - 1] + "…"


def token_rate(summary: Summary) -> tuple[str, str]:
    """Return the rate of generated tokens, or of read ones for a pooling task, which generates none, and its unit."""
    if summary.completion_tokens or not summary.prompt_tokens or not summary.seconds:
        return f"{summary.tokens_per_s:,.0f}", "generated tokens/s"
    return f"{summary.prompt_tokens / summary.seconds:,.0f}", "read tokens/s"
