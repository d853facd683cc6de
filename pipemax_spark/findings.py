"""What the committed table says about a run: totals, errors by code, a sample, accuracy. Annotates nothing."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pipemax_spark.annotate import ANNOTATION
from pipemax_spark.prompts import quoted
from pipemax_spark.report import Accuracy, Findings
from pipemax_spark.tables import DeltaTable

_SHOWN_ROWS = 5
_SHOWN_COLUMNS = 2
_SHOWN_CODES = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTotals:
    """Over the rows that one run has committed."""

    rows_error: int
    prompt_tokens: int
    completion_tokens: int


def run_totals(table: DeltaTable, run_id: str) -> RunTotals:
    from pyspark.sql import functions as F  # noqa: N812

    row = (
        _rows_of_run(table, run_id)
        .agg(
            F.count(f"{ANNOTATION}.error").alias("errors"),
            F.coalesce(F.sum(f"{ANNOTATION}.prompt_tokens"), F.lit(0)).alias("prompt"),
            F.coalesce(F.sum(f"{ANNOTATION}.completion_tokens"), F.lit(0)).alias("completion"),
        )
        .head()
    )
    return RunTotals(
        rows_error=row["errors"], prompt_tokens=row["prompt"], completion_tokens=row["completion"]
    )


def find_results(
    table: DeltaTable,
    *,
    spec_hash: str,
    run_id: str,
    gold_column: str | None,
    shown_columns: Sequence[str],
    shows_sample: bool,
) -> Findings:
    """Errors and sample are of this run; accuracy is over all rows under the spec, error rows counting as wrong."""
    rows = _rows_of_run(table, run_id)
    return Findings(
        errors=_errors(rows),
        sample=_sample(rows, shown_columns, gold_column) if shows_sample else (),
        accuracy=None if gold_column is None else _accuracy(table, spec_hash, gold_column),
    )


def _rows_of_run(table: DeltaTable, run_id: str) -> Any:
    return table.read().where(f"{ANNOTATION}.run_id = '{run_id}'")


def _errors(rows: Any) -> dict[str, tuple[int, str]]:
    from pyspark.sql import functions as F  # noqa: N812

    counted = (
        rows.where(f"{ANNOTATION}.error IS NOT NULL")
        .groupBy(F.col(f"{ANNOTATION}.error.code").alias("code"))
        .agg(F.count(F.lit(1)).alias("rows"), F.first(f"{ANNOTATION}.error.message").alias("example"))
        .orderBy(F.col("rows").desc())
        .limit(_SHOWN_CODES)
    )
    return {row["code"]: (row["rows"], row["example"]) for row in counted.collect()}


def _accuracy(table: DeltaTable, spec_hash: str, gold_column: str) -> Accuracy:
    from pyspark.sql import functions as F  # noqa: N812

    rows = table.read().where(f"{ANNOTATION}.spec_hash = '{spec_hash}'")
    # As strings: with ANSI casts, comparing a text column with a number would raise at the first word.
    given = F.col(quoted(gold_column)).cast("string")
    answer = F.col(f"{ANNOTATION}.parsed.{quoted(gold_column)}").cast("string")
    row = rows.agg(F.count_if(given == answer).alias("right"), F.count(F.lit(1)).alias("rows")).head()
    return Accuracy(column=gold_column, right=row["right"], rows=row["rows"])


def _sample(rows: Any, shown_columns: Sequence[str], gold_column: str | None) -> list[dict[str, Any]]:
    """Answers first; error rows only where there is nothing else."""
    names = list(shown_columns) or [name for name in rows.columns if name != ANNOTATION][:_SHOWN_COLUMNS]
    if gold_column is not None and gold_column not in names:
        names.append(gold_column)
    chosen = rows.where(f"{ANNOTATION}.error IS NULL").limit(_SHOWN_ROWS).collect()
    chosen = chosen or rows.limit(_SHOWN_ROWS).collect()
    return [
        {name: row[name] for name in names}
        | {
            "annotation.text": row[ANNOTATION]["text"]
            if row[ANNOTATION]["error"] is None
            else f"({row[ANNOTATION]['error']['code']})"
        }
        for row in chosen
    ]
