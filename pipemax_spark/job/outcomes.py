"""Commit annotated rows, the outcomes, to the output: append them, or replace earlier rows with them.

With ``--retry-errors``, a retried row's old error row leaves the table in the commit that brings its new outcome, so a
run that dies at any point loses neither; ``--redo-changed`` replaces the old row of a changed row in the same way, and
``--new-spec replace`` a row's old rows of other specs. Rows that are not annotated again stay: those whose row is no
longer in the input, and those beyond ``--limit``. A chunk's outcomes are first written to files and then merged,
because a merge may read its source more than once. Each merge rewrites the data files that hold the replaced rows.
"""

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, Self

from pipemax_spark.job.job import Job
from pipemax_spark.request.prompts import find_field
from pipemax_spark.rows.annotated import ANNOTATION, is_annotation
from pipemax_spark.rows.row_identity import identity
from pipemax_spark.spark.helper_columns import free_name
from pipemax_spark.spark.sql import quoted
from pipemax_spark.storage.conforming import conformed_rows
from pipemax_spark.storage.output_table import OutputTable
from pipemax_spark.storage.tables import KEY, Replaced, Transaction

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession
    from pyspark.sql.types import StructType

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


@dataclass(frozen=True, slots=True, kw_only=True)
class OldRows:
    """The rows of a table that outcomes of a spec with the same key replace."""

    spec_hash: str
    errors: bool = False
    """Error rows of the spec."""
    good: bool = False
    """All rows of the spec."""
    other_specs: bool = False
    """All rows of other specs."""

    @property
    def any(self) -> bool:
        """Whether there are any."""
        return self.errors or self.good or self.other_specs

    def condition(self, annotation: str) -> str:
        """Return a SQL condition on this annotation."""
        of_spec = f"{annotation}.spec_hash = '{self.spec_hash}'"
        kinds = {
            f"({of_spec} AND {annotation}.error.code IS NOT NULL)": self.errors,
            of_spec: self.good,
            f"{annotation}.spec_hash <> '{self.spec_hash}'": self.other_specs,
        }
        return f"({' OR '.join(kind for kind, is_replaced in kinds.items() if is_replaced)})"


class ReplacingOutcomes:
    """Outcomes that become rows of the table, some of them in place of earlier rows."""

    def __init__(
        self,
        table: OutputTable,
        *,
        old: OldRows,
        id_columns: tuple[str, ...],
        kept: "StructType",
        directory: str,
    ) -> None:
        """Keep the outcomes' files in ``directory``. ``kept`` are the columns of the input that the table has.

        Without id columns, rows are matched by all of these.
        """
        assert id_columns or not old.good, "only an id says which good row of the spec an outcome replaces"
        assert id_columns or not (old.errors and old.other_specs), "an outcome replaces one row of each spec"
        self._table = table
        self._old = old
        self._id_columns = id_columns
        self._kept_schema = kept
        self._directory = directory
        self._lock = threading.Lock()  # two merges at once would often conflict

    @classmethod
    def of(cls, job: Job, old: OldRows) -> Self:
        """Return the outcomes of a job's run."""
        return cls(
            job.table,
            old=old,
            id_columns=job.checked.id_columns,
            kept=job.checked.schema,
            directory=job.work.outcomes_path,
        )

    def commit(self, rows: "DataFrame", transaction: Transaction) -> int:
        """See ``Outcomes``."""
        from pyspark.sql import functions as F  # noqa: N812

        session = self._table.session_for_replacing()
        path = f"{self._directory}/{transaction.version}"
        shaped = conformed_rows(rows, self._table.read().schema)
        outcomes = written(session, shaped, path)
        with self._lock:
            num_kept, kept = 0, None
            key = F.expr(self._key())
            if not self._id_columns:
                kept = written(session, self._exceeding(session, outcomes, key), f"{path}-kept")
                num_kept = kept.count()
            replaced = self._replaced(outcomes.select(key.alias(KEY)), kept=kept if num_kept else None)
            self._table.replace(session, outcomes, replaced, transaction)
            return num_kept

    def drop(self, rows: "DataFrame", transaction: Transaction) -> None:
        """Commit that the old rows with the ids of ``rows``, which have at least the id columns, leave the table."""
        from pyspark.sql import functions as F  # noqa: N812

        session = self._table.session_for_replacing()
        keys = rows.select(F.expr(self._key()).alias(KEY))
        gone = written(session, keys, f"{self._directory}/{transaction.version}")
        self._table.replace(session, None, self._replaced(gone), transaction)

    def _replaced(self, keys: "DataFrame", *, kept: "DataFrame | None" = None) -> Replaced:
        return Replaced(
            keys=keys.distinct(),
            key=self._key(table="t"),
            condition=self._old.condition(f"t.{ANNOTATION}"),
            kept=kept,
        )

    def _exceeding(self, session: "SparkSession", outcomes: "DataFrame", key: "Column") -> "DataFrame":
        """Return the old rows of each spec that exceed the outcomes, to be put back.

        Without ids, equal rows all have one key, so the merge deletes all of them.
        """
        from pyspark.sql import Window
        from pyspark.sql import functions as F  # noqa: N812

        old = self._table.read(session=session).where(self._old.condition(ANNOTATION))
        columns = [
            one.name
            for one in old.schema
            if not self._table.fills_columns
            or is_annotation(one)
            or find_field(one.name, outcomes.schema) is not None
        ]
        name, number, count = (free_name(helper, old.columns) for helper in (KEY, _NUMBER, _TIMES))
        equal = Window.partitionBy(name, F.col(f"{ANNOTATION}.spec_hash")).orderBy(name)
        numbered = old.withColumn(name, key).withColumn(number, F.row_number().over(equal))
        times = outcomes.groupBy(key.alias(name)).agg(F.count(F.lit(1)).alias(count))
        return numbered.join(times, name).where(f"{number} > {count}").select(*map(quoted, columns))

    def _key(self, *, table: str | None = None) -> str:
        """Return SQL for the key by which rows are matched."""
        columns = list(self._id_columns) or self._kept_schema.names
        return identity(self._kept_schema, columns, table=table, are_ids=bool(self._id_columns))


def written(session: "SparkSession", rows: "DataFrame", path: str) -> "DataFrame":
    """Write the rows to files and return them as read from there, so that every evaluation gives the same rows."""
    rows.write.parquet(path)
    return session.read.schema(rows.schema).parquet(path)
