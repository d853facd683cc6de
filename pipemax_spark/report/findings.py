"""Read a run's results from the committed table: totals, errors by code, a sample, accuracy and the worst rows.

This module annotates nothing.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from pipemax_spark.options import JobOptions
from pipemax_spark.report.accuracy import accuracies_of, is_wrong
from pipemax_spark.report.distributions import distributions_of
from pipemax_spark.report.past_runs import past_runs
from pipemax_spark.report.sampled_rows import RowSampler
from pipemax_spark.report.summary import Findings
from pipemax_spark.rows.annotated import ANNOTATION
from pipemax_spark.rows.checked import Checked
from pipemax_spark.storage.output_table import OutputTable

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

_SHOWN_ROWS = 10
_SHOWN_ERRORS = 3
"""Rows shown of an error code."""
_SHOWN_CODES = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class CommittedTotals:
    """Totals over rows that the table holds."""

    rows: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int | None = None
    """Tokens of ``completion_tokens`` that thinking took; None if none is split off."""
    rows_retried: int | None = None
    """Rows that took more than one attempt; None if each has one."""
    extra_attempts: int | None = None
    """Attempts beyond the first of all rows."""
    errors: Mapping[str, tuple[int, str]] = field(default_factory=dict)
    """Error code → (rows, one of their messages), the most frequent first."""

    @property
    def rows_error(self) -> int:
        return sum(rows for rows, _ in self.errors.values())


def totals_of_run(table: OutputTable, run_id: str) -> CommittedTotals:
    """Return the totals of the rows that one run has committed. Reads them once."""
    return totals_of_rows(_rows_of_run(table, run_id))


def totals_of_spec(table: OutputTable, spec_hash: str) -> CommittedTotals:
    """Return the totals of all rows under a spec, whichever run has committed them. Reads them once."""
    return totals_of_rows(_rows_of_spec(table, spec_hash))


def runs_of_spec(table: OutputTable, spec_hash: str) -> list[str]:
    """Return the runs that computed rows which the table holds under a spec, the latest first.

    Run ids begin with the time of the run's start.
    """
    rows = _rows_of_spec(table, spec_hash)
    return sorted((row[0] for row in rows.select(f"{ANNOTATION}.run_id").distinct().collect()), reverse=True)


def totals_of_rows(rows: "DataFrame") -> CommittedTotals:
    """Return the totals of these rows of the output. Reads them once."""
    from pyspark.sql import functions as F  # noqa: N812

    fields = _fields(rows)
    asked: dict[str, Column] = {}
    if "reasoning_tokens" in fields:
        asked["reasoning_tokens"] = F.col(f"{ANNOTATION}.reasoning_tokens")
    if "attempts" in fields:
        extra = F.col(f"{ANNOTATION}.attempts") - 1
        asked |= {"rows_retried": F.when(extra > 0, 1).otherwise(0), "extra_attempts": extra}
    # A pooling task generates none, and its annotation has no such field.
    generated = F.col(f"{ANNOTATION}.completion_tokens") if "completion_tokens" in fields else F.lit(0)
    by_code = (
        rows.groupBy(F.col(f"{ANNOTATION}.error.code").alias("code"))
        .agg(
            F.count(F.lit(1)).alias("rows"),
            F.first(f"{ANNOTATION}.error.message").alias("example"),
            F.coalesce(F.sum(f"{ANNOTATION}.prompt_tokens"), F.lit(0)).alias("prompt"),
            F.coalesce(F.sum(generated), F.lit(0)).alias("completion"),
            *(F.sum(expression).alias(name) for name, expression in asked.items()),
        )
        .collect()
    )
    failed = sorted((row for row in by_code if row["code"] is not None), key=lambda row: -row["rows"])
    return CommittedTotals(
        rows=sum(row["rows"] for row in by_code),
        prompt_tokens=sum(row["prompt"] for row in by_code),
        completion_tokens=sum(row["completion"] for row in by_code),
        **{name: sum(row[name] or 0 for row in by_code) for name in asked},
        errors={row["code"]: (row["rows"], row["example"]) for row in failed},
    )


def find_results(
    table: OutputTable, options: JobOptions, checked: Checked, totals: CommittedTotals | None
) -> Findings:
    """Return errors, distributions and a sample of this run, the last runs, and the accuracy under the spec.

    ``totals`` is None if the run has committed nothing; then there is only the accuracy. Error rows count as wrong.
    Where no rows may be shown, there is no sample, and errors have no example.
    """
    from pyspark.sql import functions as F  # noqa: N812

    golds = options.golds
    of_spec = _rows_of_spec(table, checked.spec.hash) if golds else None
    accuracies = [] if of_spec is None else accuracies_of(of_spec, golds, shows_values=not options.no_sample)
    if totals is None:
        return Findings(accuracies=accuracies)
    rows = _rows_of_run(table, checked.plan.run_id)
    shown_errors = {code: (n, "" if options.no_sample else text) for code, (n, text) in totals.errors.items()}
    findings = Findings(
        errors=shown_errors,
        accuracies=accuracies,
        distributions=distributions_of(rows, options),
        past_runs=past_runs(table),
    )
    if options.no_sample:
        return findings
    sampler = RowSampler(rows, options, checked.id_columns)
    error_rows = {
        code: sampler.some(F.col(f"{ANNOTATION}.error.code") == code, max_rows=_SHOWN_ERRORS)
        for code in [*totals.errors][:_SHOWN_CODES]
    }
    has_answers = totals.rows > totals.rows_error
    sample = sampler.some(f"{ANNOTATION}.error IS NULL", max_rows=_SHOWN_ROWS) if has_answers else []
    if of_spec is not None:
        of_all = RowSampler(of_spec, options, checked.id_columns)
        accuracies = [
            replace(
                accuracy,
                worst_rows=of_all.surest(is_wrong(of_spec, gold), gold.answers, max_rows=_SHOWN_ROWS),
            )
            for accuracy, gold in zip(accuracies, golds, strict=True)
        ]
    return replace(findings, error_rows=error_rows, sample=sample, accuracies=accuracies)


def _rows_of_run(table: OutputTable, run_id: str) -> "DataFrame":
    return table.read().where(f"{ANNOTATION}.run_id = '{run_id}'")


def _rows_of_spec(table: OutputTable, spec_hash: str) -> "DataFrame":
    return table.read().where(f"{ANNOTATION}.spec_hash = '{spec_hash}'")


def _fields(rows: "DataFrame") -> list[str]:
    """Return the fields of the annotation, some of which exist only where a job asks for them."""
    return list(rows.select(f"{ANNOTATION}.*").columns)
