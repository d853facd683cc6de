"""Mark or remove the output's rows whose rows the input has deleted (``--on-delete``), each kind in one commit.

This comes before a batch's rows are annotated and before the night's position is noted, so a night that dies in between
finds the same rows again, or finds that they are marked or gone. A row that the input has again is no longer marked.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipemax_spark.errors import CommitRefusedError, OnDelete, TakenOverError
from pipemax_spark.job.job import Job
from pipemax_spark.job.outcomes import written
from pipemax_spark.rows.incremental import Batch
from pipemax_spark.rows.row_identity import identity
from pipemax_spark.spark.sql import quoted
from pipemax_spark.storage.fence import Claim
from pipemax_spark.storage.tables import KEY, Replaced

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.types import StructType

DELETED_AT = "annotation_deleted_at"
"""The output's column with the time at which a night has found the row deleted in the input; only with ``mark``."""


@dataclass(frozen=True, slots=True)
class DeletedRows:
    """Settles the deleted rows of a batch; ``claimed`` claims the output, ``number`` takes an unused chunk number."""

    job: Job
    claimed: Callable[[], Claim]
    number: Callable[[], int]

    def settle(self, batch: Batch) -> int:
        """Return how many rows of the output were marked or removed."""
        gone, there = batch.gone_ids, batch.kept_ids
        if gone is None:
            return 0
        match self.job.options.on_delete:
            case OnDelete.KEEP:
                self._say(gone.count(), "stay in the output (--on-delete)")
                return 0
            case OnDelete.REMOVE:
                rows = self._commit(gone, "true", None, what="removes rows that the input deleted")
                self._say(rows, "were removed")
                return rows
            case OnDelete.MARK:
                if there is not None:
                    what = "unmarks rows that the input has again"
                    self._commit(there, f"t.{DELETED_AT} IS NOT NULL", f"{DELETED_AT} = NULL", what=what)
                assigned = f"{DELETED_AT} = current_timestamp()"
                what = "marks rows that the input deleted"
                rows = self._commit(gone, f"t.{DELETED_AT} IS NULL", assigned, what=what)
                self._say(rows, f"were marked ({DELETED_AT})")
                return rows

    def _say(self, rows: int, what: str) -> None:
        if rows:
            self.job.terminal.say("Deleted", f"{rows:,} rows, of which the input has none any more, {what}")

    def _commit(self, ids: "DataFrame", condition: str, assigned: str | None, *, what: str) -> int:
        """Remove the output's rows with these ids that fulfil the condition, or change them; return their number."""
        from pyspark.sql import functions as F  # noqa: N812

        job, names = self.job, list(self.job.checked.id_columns)
        columns = [*map(quoted, names)]
        rows = job.table.read().alias("t").where(condition).select(*columns)
        if rows.join(ids, names, "left_semi").isEmpty():
            return 0
        claim, number = self.claimed(), self.number()
        held = job.table.read().alias("t").where(condition).select(*columns).join(ids, names, "left_semi")
        session = job.table.session_for_replacing()
        keys = held.select(F.expr(identity(self._schema, names, are_ids=True)).alias(KEY))
        keys = written(session, keys, f"{job.work.outcomes_path}/deleted-{number}")
        replaced = Replaced(
            keys=keys.distinct(),
            key=identity(self._schema, names, table="t", are_ids=True),
            condition=condition,
            assigned=assigned,
        )
        transaction = claim.deletion(number, what=what)
        try:
            job.table.replace(session, None, replaced, transaction)
        except CommitRefusedError as error:
            raise TakenOverError(claim.taken_over()) from error
        claim.landed(transaction, expected_rows=0)
        return keys.count()

    @property
    def _schema(self) -> "StructType":
        return self.job.checked.schema


def with_mark(schema: "StructType", on_delete: OnDelete) -> "StructType":
    """Return the schema of an output's rows with the column for the mark, if rows are marked."""
    from pyspark.sql.types import StructType, TimestampType

    return (
        StructType([*schema.fields]).add(DELETED_AT, TimestampType())
        if on_delete is OnDelete.MARK
        else schema
    )
