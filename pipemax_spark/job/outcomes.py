"""Commit annotated rows, the outcomes, to the output: append them, or replace earlier rows with them.

With ``--retry-errors``, a retried row's old error row leaves the table in the commit that brings its new outcome, so a
run that dies at any point loses neither; ``--redo-changed`` replaces the old row of a changed row in the same way. Rows
that are not annotated again stay: those whose row is no longer in the input, and those beyond ``--limit``. A chunk's
outcomes are first written to files and then merged, because a merge may read its source more than once. Each merge
rewrites the data files that hold the replaced rows.
"""

import threading
from typing import TYPE_CHECKING, Protocol

from pipemax_spark.request.prompts import find_field
from pipemax_spark.rows.annotated import ANNOTATION
from pipemax_spark.rows.row_identity import identity, occurrence
from pipemax_spark.spark.helper_columns import free_name
from pipemax_spark.spark.sql import quoted
from pipemax_spark.storage.conforming import conformed
from pipemax_spark.storage.output_table import OutputTable
from pipemax_spark.storage.tables import KEY, Replaced, Transaction

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

_TIMES, _NUMBER = "__pipemax_times", "__pipemax_number"


class Outcomes(Protocol):
    """Commits a chunk's outcomes."""

    def commit(self, rows: "DataFrame", transaction: Transaction) -> int:
        """Commit annotated ``rows``, which are evaluated once; commit nothing if the table refuses the transaction.

        Return how many rows the commit adds beyond these.
        """
        ...


class AppendedOutcomes:
    """Outcomes that become new rows of the table."""

    def __init__(self, table: OutputTable) -> None:
        self._table = table

    def commit(self, rows: "DataFrame", transaction: Transaction) -> int:
        """See ``Outcomes``."""
        self._table.append(rows, transaction)
        return 0


class StagedOutcomes:
    """Outcomes that become new rows of a table with an identity column, appended from files one chunk at a time.

    Each commit to such a table changes its metadata, so Delta refuses an append that overlaps another one; the appends
    of two chunks would overlap for as long as the engines work.
    """

    def __init__(self, table: OutputTable, directory: str) -> None:
        """Keep the outcomes' files in ``directory``."""
        self._table = table
        self._directory = directory
        self._lock = threading.Lock()

    def commit(self, rows: "DataFrame", transaction: Transaction) -> int:
        """See ``Outcomes``."""
        outcomes = written(rows.sparkSession, rows, f"{self._directory}/{transaction.version}")
        with self._lock:
            self._table.append(outcomes, transaction)
        return 0


class ReplacingOutcomes:
    """Outcomes that become rows of the table, some of them in place of earlier rows of the same spec."""

    def __init__(
        self,
        table: OutputTable,
        *,
        spec_hash: str,
        id_columns: tuple[str, ...],
        directory: str,
        errors_only: bool = True,
    ) -> None:
        """Keep the outcomes' files in ``directory``. Unless ``errors_only``, replace good rows of the same ids too."""
        assert errors_only or id_columns, "only an id says which good row an outcome replaces"
        self._table = table
        self._spec_hash = spec_hash
        self._id_columns = id_columns
        self._directory = directory
        self._errors_only = errors_only
        self._lock = threading.Lock()  # two merges at once would often conflict

    def num_error_rows(self) -> int:
        """Count the error rows of the spec that the table holds."""
        rows: int = self._table.read().where(self._is_error(ANNOTATION)).count()
        return rows

    def commit(self, rows: "DataFrame", transaction: Transaction) -> int:
        """See ``Outcomes``."""
        from pyspark.sql import functions as F  # noqa: N812

        of_table = find_field(ANNOTATION, self._table.read().schema)
        assert of_table is not None, f"{self._table.name} has no column {ANNOTATION}"
        annotation = conformed(F.col(ANNOTATION), rows.schema[ANNOTATION].dataType, of_table.dataType)
        session = self._table.session_for_replacing()
        path = f"{self._directory}/{transaction.version}"
        outcomes = written(session, rows.withColumn(ANNOTATION, annotation), path)
        with self._lock:
            num_kept = 0
            key = F.expr(self._key(outcomes))
            inserted = outcomes
            if not self._id_columns:
                kept = written(session, self._kept(session, outcomes, key), f"{path}-kept")
                num_kept = kept.count()
                inserted = inserted.unionByName(kept)
            replaced = Replaced(
                keys=outcomes.select(key.alias(KEY)).distinct(),
                key=self._key(outcomes, table="t"),
                condition=self._is_replaced(f"t.{ANNOTATION}"),
            )
            self._table.replace(session, inserted, replaced, transaction)
            return num_kept

    def _kept(self, session: "SparkSession", outcomes: "DataFrame", key: "Column") -> "DataFrame":
        """Return the error rows that exceed the outcomes, to be put back.

        Without ids, equal error rows all have one key, so the merge deletes all of them.
        """
        from pyspark.sql import functions as F  # noqa: N812

        old = (
            self._table.read(session=session)
            .where(self._is_error(ANNOTATION))
            .select(*map(quoted, outcomes.columns))
        )
        name, number, count = (free_name(helper, outcomes.columns) for helper in (KEY, _NUMBER, _TIMES))
        old = old.withColumn(name, key).withColumn(number, occurrence(name))
        times = outcomes.groupBy(key.alias(name)).agg(F.count(F.lit(1)).alias(count))
        return old.join(times, name).where(f"{number} > {count}").select(*map(quoted, outcomes.columns))

    def _key(self, rows: "DataFrame", *, table: str | None = None) -> str:
        """Return SQL for the key by which rows with the columns of ``rows`` are matched."""
        columns = list(self._id_columns) or [name for name in rows.columns if name != ANNOTATION]
        return identity(rows.schema, columns, table=table, are_ids=bool(self._id_columns))

    def _is_replaced(self, annotation: str) -> str:
        """Return a SQL condition on this annotation: an outcome with the same key replaces its row."""
        return (
            self._is_error(annotation)
            if self._errors_only
            else f"{annotation}.spec_hash = '{self._spec_hash}'"
        )

    def _is_error(self, annotation: str) -> str:
        """Return a SQL condition on this annotation: it is an error row of the spec."""
        return f"{annotation}.spec_hash = '{self._spec_hash}' AND {annotation}.error.code IS NOT NULL"


def written(session: "SparkSession", rows: "DataFrame", path: str) -> "DataFrame":
    """Write the rows to files and return them as read from there, so that every evaluation gives the same rows."""
    rows.write.parquet(path)
    return session.read.schema(rows.schema).parquet(path)
