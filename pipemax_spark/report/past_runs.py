"""Read what the last runs have added to the output, from its history and its rows, to show them next to each other.

The history names the runs; the rows say how many there are of each, with which errors and lengths, and when the last
one was done. Rows that a later run has replaced count for that run. This module knows nothing of how it is shown.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from pipemax_spark.rows.annotated import ANNOTATION
from pipemax_spark.storage.fence import recent_runs
from pipemax_spark.storage.output_table import OutputTable

SHOWN_RUNS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class PastRun:
    """What the output holds of a run."""

    run_id: str
    started: datetime
    seconds: float
    """From the run's start, its checks and the engines' start included, to its last answer."""
    rows: int
    rows_error: int
    prompt_tokens: int
    completion_tokens: int

    @property
    def rows_answered(self) -> int:
        return self.rows - self.rows_error


def started_at(run_id: str) -> datetime:
    """Return when a run began, with which its id begins, in UTC."""
    return datetime.strptime(run_id.partition("-")[0], "%Y%m%dT%H%M%S").replace(tzinfo=UTC)


def past_runs(table: OutputTable) -> Sequence[PastRun]:
    """Return the last runs of which the output holds rows, the latest first; nothing if there is only one.

    Reads the annotations of their rows once.
    """
    from pyspark.sql import functions as F  # noqa: N812

    runs = recent_runs(table)[:SHOWN_RUNS]
    if len(runs) < 2:
        return ()
    rows = table.read().where(F.col(f"{ANNOTATION}.run_id").isin(runs))
    fields = rows.select(f"{ANNOTATION}.*").columns
    generated = F.col(f"{ANNOTATION}.completion_tokens") if "completion_tokens" in fields else F.lit(0)
    by_run = (
        rows.groupBy(F.col(f"{ANNOTATION}.run_id").alias("run_id"))
        .agg(
            F.count(F.lit(1)).alias("rows"),
            F.count_if(F.col(f"{ANNOTATION}.error").isNotNull()).alias("errors"),
            F.coalesce(F.sum(f"{ANNOTATION}.prompt_tokens"), F.lit(0)).alias("prompt"),
            F.coalesce(F.sum(generated), F.lit(0)).alias("completion"),
            F.unix_micros(F.max(f"{ANNOTATION}.completed_at")).alias("ended"),
        )
        .collect()
    )
    made = [
        PastRun(
            run_id=row["run_id"],
            started=(started := started_at(row["run_id"])),
            seconds=max(0.0, row["ended"] / 1e6 - started.timestamp()),
            rows=row["rows"],
            rows_error=row["errors"],
            prompt_tokens=row["prompt"],
            completion_tokens=row["completion"],
        )
        for row in by_run
    ]
    return sorted(made, key=lambda run: run.run_id, reverse=True) if len(made) > 1 else ()
