"""Name the commits of a Delta table that a stream with ``skipChangeCommits`` skips.

Delta skips a commit as a whole if it removed any row: a ``MERGE`` that updates one row and inserts two as well as an
``UPDATE``. The table's history says how many rows of each kind a commit had, but not which.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipemax_spark.storage.tables import DeltaTable

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_INSERTS_NOTHING = frozenset({"DELETE", "TRUNCATE", "UPDATE"})
_KEEPS_ROWS = ("OPTIMIZE", "REORG", "VACUUM")


@dataclass(frozen=True, slots=True, kw_only=True)
class SkippedCommit:
    """A commit that updated or deleted rows."""

    version: int
    operation: str
    updated: int | None
    deleted: int | None
    """Numbers of rows; None if the history does not tell."""
    may_insert: bool
    """Whether it may have inserted rows, too."""

    def __str__(self) -> str:
        counts = {"updated": self.updated, "deleted": self.deleted}
        parts = [f"{count:,} row{'s' * (count != 1)} {what}" for what, count in counts.items() if count]
        return f"commit {self.version} ({self.operation}: {', '.join(parts) or 'rows replaced'})"


def skipped_commits(spark: "SparkSession", table: DeltaTable, first: int, last: int) -> list[SkippedCommit]:
    """Return the table's commits of these versions, both included, that a stream skips, the oldest first."""
    history = spark.sql(f"DESCRIBE HISTORY {table.sql_name}")
    history = history.where(f"version BETWEEN {first} AND {last}").orderBy("version")
    columns = ("version", "operation", "operationParameters", "operationMetrics")
    commits = (
        _skipped(
            row["version"], row["operation"], row["operationParameters"] or {}, row["operationMetrics"] or {}
        )
        for row in history.select(*columns).collect()
    )
    return [commit for commit in commits if commit is not None]


def _skipped(
    version: int, operation: str, parameters: Mapping[str, str], metrics: Mapping[str, str]
) -> SkippedCommit | None:
    def count(*names: str) -> int | None:
        return next((int(metrics[name]) for name in names if name in metrics), None)

    updated = count("numTargetRowsUpdated", "numUpdatedRows")
    deleted = count("numTargetRowsDeleted", "numDeletedRows")
    inserted = count("numTargetRowsInserted")
    if operation.startswith(_KEEPS_ROWS):
        return None
    if operation == "MERGE":
        removes, inserts = updated != 0 or deleted != 0, inserted != 0
    elif operation in _INSERTS_NOTHING:
        removes, inserts = updated != 0 or deleted != 0, False
    else:  # an overwrite, a restore, a replaced table
        is_overwrite = parameters.get("mode", "").lower() == "overwrite" and version > 0
        replaces = is_overwrite or "REPLACE" in operation or operation in ("CLONE", "RESTORE")
        removes = inserts = replaces or bool(count("numRemovedFiles") or deleted)
    if not removes:
        return None
    return SkippedCommit(
        version=int(version), operation=operation, updated=updated, deleted=deleted, may_insert=inserts
    )
