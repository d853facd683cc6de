"""A Delta table by path or name: read it, and commit to it under Delta's own transaction pairs.

This module uses plain SQL and the DataFrame API, so Delta's jars are enough and its Python package is not needed. It
knows nothing of annotations.
"""

import hashlib
import logging
import re
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING

from pipemax_spark.errors import CommitRefusedError, JobError, cause_of
from pipemax_spark.spark.helper_columns import free_name
from pipemax_spark.spark.session import is_connect
from pipemax_spark.spark.sql import literal, quoted
from pipemax_spark.storage.hadoop import HadoopFiles, plain_path
from pipemax_spark.storage.names import is_path, provider_of, sql_name
from pipemax_spark.storage.partition_values import ChangedValues, changed_in_delta

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, Row, SparkSession
    from pyspark.sql.types import DataType, StructType

log = logging.getLogger(__name__)

KEY = "__pipemax_key"
"""The column of ``Replaced.keys``."""
_ORIGIN = "__pipemax_origin"
_VIEW = "pipemax_outcomes"

_REFUSED = "ConcurrentTransactionException"
"""Another commit under the same application id landed while this one was under way."""
_FOREIGN = re.compile(
    r"(MetadataChanged|ProtocolChanged|ConcurrentAppend|ConcurrentDeleteRead|ConcurrentDeleteDelete|ConcurrentWrite)"
    r"Exception"
)
"""Another writer's commit conflicted with this one. Nothing was committed, so the commit can be retried."""
_NO_VALUE = "DELTA_MISSING_NOT_NULL_COLUMN_VALUE"
"""The rows lack a NOT NULL column that Delta cannot fill; Delta refuses this even if there are no rows."""
_NO_TABLE = ("DELTA_TABLE_ONLY_OPERATION", "DELTA_PATH_DOES_NOT_EXIST", "DELTA_MISSING_DELTA_TABLE")
"""Conditions of Delta's errors where there is no Delta table at a path."""
_COMMIT_ATTEMPTS = 5
_FIRST_COMMITS_READ = 16
_GROWTH = 8
_MARK_BYTES = 1 << 16
"""Enough of a commit's file, which may be large, to hold the commit's time and random names of its files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Transaction:
    """The name of one commit.

    Delta silently skips a commit whose ``version`` is not above the last one of its ``app_id``, and fails a commit that
    was under way while another one of the same ``app_id`` landed.
    """

    app_id: str
    version: int
    note: str
    """Names the commit in the table's history, where no other commit has this note."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """A commit that has landed, by Delta's own history."""

    version: int
    rows: int | None
    """Rows that it added; None if the table's history keeps no metrics."""
    operation: str
    """Delta's name for what it did: ``WRITE``, ``OPTIMIZE``."""
    note: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Replaced:
    """Which of a table's rows are replaced by new ones, or changed."""

    keys: "DataFrame"
    """Their keys, distinct, in the column ``KEY``."""
    key: str
    """SQL: the key of a row of the table, which is called ``t``."""
    condition: str
    """SQL that is true for a row of ``t`` which may be replaced."""
    assigned: str | None = None
    """SQL: what is assigned to columns of these rows, which then stay."""
    kept: "DataFrame | None" = None
    """Rows of the table that have such a key and stay: they are put back as they are."""


class CommitHistory:
    """The commits of a table of either format."""

    def history(self, since_version: int, *, expected: int = _FIRST_COMMITS_READ) -> Iterator[Commit | None]:
        """Yield the commits after ``since_version``, the latest first; None in place of those that are forgotten.

        ``expected`` is about the number of commits that the caller takes.
        """
        raise NotImplementedError

    def find_commit(self, note: str, *, since_version: int) -> Commit | None:
        """Return the commit with this note after ``since_version``, or None."""
        return next((c for c in self.history(since_version) if c is not None and c.note == note), None)

    def notes(self, prefix: str, *, since_version: int) -> list[str]:
        """Return the notes of the commits after ``since_version`` that begin with ``prefix``, the latest first."""
        return [c.note for c in self.history(since_version) if c is not None and c.note.startswith(prefix)]

    def recent_notes(self, prefix: str, *, commits: int) -> list[str]:
        """Return the notes of the last ``commits`` commits that begin with ``prefix``, the latest first."""
        recent = islice(self.history(-1, expected=commits), commits)
        return [c.note for c in recent if c is not None and c.note.startswith(prefix)]

    def commits_since(self, version: int) -> list[Commit] | None:
        """Return all commits after ``version``, the latest first; None if the table has forgotten some of them."""
        commits = [*self.history(version)]
        known = [commit for commit in commits if commit is not None]
        return known if len(known) == len(commits) else None


class DeltaTable(CommitHistory):
    """A table that may not exist yet."""

    format_name = "Delta"

    def __init__(self, spark: "SparkSession", name: str) -> None:
        self._spark = spark
        self._by_path = is_path(name)
        self.name = plain_path(name)

    @property
    def sql_name(self) -> str:
        if self._by_path:
            return f"delta.`{self.name.replace('`', '``')}`"
        return sql_name(self.name)

    def exists(self) -> bool:
        """Tell whether the Delta table exists: False also for tables and views that are not Delta's."""
        if is_connect(self._spark):
            return self._has_history() if self._by_path else provider_of(self._spark, self.name) == "delta"
        if self._by_path:
            files, log = HadoopFiles(self._spark), f"{self.name}/_delta_log"
            if files.exists(f"{log}/{0:020}.json") or files.exists(f"{log}/_last_checkpoint"):
                return True
            # A job that was killed while it created the table has left a log without a commit.
            return any(entry.name[:20].isdecimal() for entry in files.list(log))
        return provider_of(self._spark, self.name) == "delta"

    def _has_history(self) -> bool:
        """Tell whether Delta finds a table at the path, for a session that has no other view of the files there."""
        from pyspark.errors import AnalysisException

        try:
            self.version()
        except AnalysisException as error:
            if (error.getCondition() or "").startswith(_NO_TABLE):
                return False
            raise
        return True

    def check_usable(self, *, replaces: str | None) -> None:
        """Raise ``JobError`` if the table cannot be a job's output; Delta's rules are checked with the columns."""

    def stored(self, schema: "StructType") -> "StructType":
        """Return the schema with the types in which the table keeps its columns: the same."""
        return schema

    def changed_values(self, schema: "StructType") -> list[ChangedValues]:
        """Return the values of rows of this schema that the table, which exists, would not keep as they are."""
        return changed_in_delta(schema, self._detail()["partitionColumns"])

    def read(
        self,
        *,
        version: int | None = None,
        options: Mapping[str, str] | None = None,
        session: "SparkSession | None" = None,
    ) -> "DataFrame":
        """Return the table's rows, as a DataFrame of ``session`` if that is given."""
        reader = (session or self._spark).read.format("delta").options(**(options or {}))
        if version is not None:
            reader = reader.option("versionAsOf", version)
        return reader.load(self.name) if self._by_path else reader.table(self.name)

    def read_stream(self, options: Mapping[str, str]) -> "DataFrame":
        """Return the table's present rows, and then those that are appended, as a streaming DataFrame."""
        reader = self._spark.readStream.format("delta").options(**options)
        return reader.load(self.name) if self._by_path else reader.table(self.name)

    def version(self) -> int:
        return int(self._spark.sql(f"DESCRIBE HISTORY {self.sql_name} LIMIT 1").collect()[0]["version"])

    def commit_mark(self, version: int) -> str | None:
        """Return a text that distinguishes this version's commit from any other; None if the log no longer has it."""
        path = f"{self.location()}/_delta_log/{version:020}.json"
        try:
            beginning = HadoopFiles(self._spark).read_beginning(path, _MARK_BYTES)
        except FileNotFoundError:
            return None
        return hashlib.sha256(beginning).hexdigest()

    def version_named(self, option: Mapping[str, str]) -> int:
        """Return the version that Delta's read option ``versionAsOf`` or ``timestampAsOf`` means."""
        from pyspark.sql import functions as F  # noqa: N812

        [(name, value)] = option.items()
        _ = self.read(options=option).schema  # Delta says itself what is wrong with it
        if name.lower() == "versionasof":
            return int(value)
        history = self._spark.sql(f"DESCRIBE HISTORY {self.sql_name}")
        known = history.where(F.col("timestamp") <= F.lit(value).cast("timestamp"))
        return int(known.agg(F.max("version")).collect()[0][0])

    def table_id(self) -> str:
        return str(self._identity["id"])

    def location(self) -> str:
        return plain_path(str(self._identity["location"]))

    def properties(self) -> dict[str, str]:
        return dict(self._detail()["properties"])

    @property
    def takes_one_append_at_a_time(self) -> bool:
        """Whether overlapping appends conflict: each commit to a table with an identity column changes its metadata."""
        return "identityColumns" in self._features

    @property
    def fills_columns(self) -> bool:
        """Whether Delta may fill some columns itself and refuse values for them; it does not show which these are."""
        return not self._features.isdisjoint(("generatedColumns", "identityColumns"))

    @property
    def _features(self) -> frozenset[str]:
        """Those that the protocol listed when the table was first looked up; these two are there from its creation."""
        return frozenset(self._identity["tableFeatures"])

    def create(self, schema: "StructType") -> None:
        """Create an empty table. Raise ``JobError`` if something else is in its place."""
        from pyspark.errors import AnalysisException

        # Parquet's own names may not contain these; with column mapping, Delta keeps them only in its schema.
        is_mapped = any(re.search(r"[ ,;{}()\n\t=]", name) for name in _all_names(schema))
        mapping = {"delta.columnMapping.mode": "name"} if is_mapped else {}
        try:
            # Another run may create it at this moment.
            _try_commit(lambda: self._append(self.no_rows(schema), mapping), f"creating {self.name}")
        except AnalysisException as error:
            raise JobError(
                f"output {self.name!r} cannot be created: {cause_of(error)}; name another one"
            ) from error

    def add_columns(self, schema: "StructType") -> None:
        """Add the columns and nested fields that the table lacks. Raise ``JobError`` if it cannot take such rows."""
        from pyspark.errors import AnalysisException

        try:
            options = {"mergeSchema": "true"}
            _try_commit(lambda: self._append(self.no_rows(schema), options), f"new columns of {self.name}")
        except Exception as error:
            if not isinstance(error, AnalysisException) and _NO_VALUE not in str(error):
                raise
            raise JobError(
                f"output {self.name!r} cannot take these rows: {cause_of(error)}; name another output"
            ) from error

    def no_rows(self, schema: "StructType") -> "DataFrame":
        """Return an empty DataFrame with this schema."""
        return self._spark.createDataFrame([], schema)

    def set_properties(self, properties: Mapping[str, str]) -> None:
        assignments = ", ".join(f"{literal(key)} = {literal(value)}" for key, value in properties.items())
        self._spark.sql(f"ALTER TABLE {self.sql_name} SET TBLPROPERTIES ({assignments})")

    def append(self, rows: "DataFrame", transaction: Transaction) -> None:
        """Commit the rows. Raise ``CommitRefusedError`` if Delta fails the transaction.

        If Delta skips the transaction, only ``find_commit`` shows it. ``rows`` are evaluated once, and again if another
        writer changed the table's metadata meanwhile.
        """
        options = {
            "txnAppId": transaction.app_id,
            "txnVersion": str(transaction.version),
            "userMetadata": transaction.note,
        }
        _try_commit(lambda: self._append(rows, options), transaction.note)

    def append_nothing(self, transaction: Transaction, schema: "StructType | None" = None) -> None:
        """Commit the transaction without rows, as in ``append``.

        ``schema`` is that of the rows to come, for a table that has columns which only Delta may fill; without it, the
        commit has all of the table's columns.
        """
        self.append(self.no_rows(schema or self.read().schema), transaction)

    def session_for_replacing(self) -> "SparkSession":
        """Return the session for ``replace``: a copy, because the merge's transaction is among its settings."""
        from pyspark.sql import SparkSession

        # Not a new session, which would have the application's settings, not those under which the job runs.
        return SparkSession(self._spark.sparkContext, self._spark._jsparkSession.cloneSession())

    def replace(
        self, session: "SparkSession", rows: "DataFrame | None", replaced: Replaced, transaction: Transaction
    ) -> None:
        """Commit the rows, if any, and delete or change the ones that they replace, in one merge; see ``merge``."""
        from pyspark.sql import functions as F  # noqa: N812

        inserted = [frame for frame in (rows, replaced.kept) if frame is not None]
        columns = [name for frame in inserted for name in frame.columns]
        key, origin = free_name(KEY, columns), free_name(_ORIGIN, columns)
        view = f"{_VIEW}_{uuid.uuid4().hex[:12]}"
        source, insert = replaced.keys.toDF(key), ""
        for number, frame in enumerate(inserted):
            # Rows with a null key are inserted, each with the columns that it has; the old rows of the other keys are
            # deleted.
            new = frame.withColumns({key: F.lit(None).cast("string"), origin: F.lit(number)})
            source = new.unionByName(source, allowMissingColumns=True)
            names = ", ".join(quoted(name) for name in frame.columns)
            values = ", ".join(f"s.{quoted(name)}" for name in frame.columns)
            insert += f" WHEN NOT MATCHED AND s.{origin} = {number} THEN INSERT ({names}) VALUES ({values})"
        source.createOrReplaceTempView(view)  # of this session only, but it would hide a table of its name
        matched = f"s.{key} = {replaced.key} AND {replaced.condition}"
        change = "DELETE" if replaced.assigned is None else f"UPDATE SET {replaced.assigned}"
        self.merge(session, f"USING {view} AS s ON {matched} WHEN MATCHED THEN {change}{insert}", transaction)

    def merge(self, session: "SparkSession", clauses: str, transaction: Transaction) -> None:
        """Run ``MERGE INTO`` this table, called ``t`` in ``clauses``; Delta may refuse it as in ``append``.

        ``session`` is the caller's own session, because Delta reads the transaction from the session's settings.
        """
        session.conf.set("spark.databricks.delta.commitInfo.userMetadata", transaction.note)
        session.conf.set("spark.databricks.delta.write.txnAppId", transaction.app_id)
        session.conf.set("spark.databricks.delta.write.txnVersion", str(transaction.version))
        statement = f"MERGE INTO {self.sql_name} AS t {clauses}"
        _try_commit(lambda: session.sql(statement).collect(), transaction.note)

    def compact(self) -> tuple[int, int]:
        """Join small files into files of the table's target size, by Delta's ``OPTIMIZE``.

        Return the number of files joined and the number of files that they became.
        """
        metrics = self._spark.sql(f"OPTIMIZE {self.sql_name}").collect()[0]["metrics"]
        return int(metrics["numFilesRemoved"]), int(metrics["numFilesAdded"])

    def history(self, since_version: int, *, expected: int = _FIRST_COMMITS_READ) -> Iterator[Commit | None]:
        """Yield the commits, as in ``CommitHistory``: as a rule by one Spark job, and by more if there are more."""
        oldest, commits = None, expected
        while True:
            latest = self._spark.sql(f"DESCRIBE HISTORY {self.sql_name} LIMIT {commits}")
            rows = latest.select("version", "operation", "userMetadata", "operationMetrics").collect()
            oldest = rows[0]["version"] + 1 if oldest is None else oldest
            for row in rows:
                if since_version < row["version"] < oldest:
                    oldest = row["version"]
                    yield _commit(row)
            if len(rows) < commits or rows[-1]["version"] <= since_version:
                break
            commits *= _GROWTH
        if oldest != since_version + 1:
            yield None

    def _append(self, rows: "DataFrame", options: Mapping[str, str]) -> None:
        writer = rows.write.format("delta").mode("append").options(**options)
        if self._by_path:
            writer.save(self.name)
        else:
            writer.saveAsTable(self.name)

    @cached_property
    def _identity(self) -> "Row":
        """The table's details, of which id and location never change: looking them up takes a Spark job."""
        return self._detail()

    def _detail(self) -> "Row":
        return self._spark.sql(f"DESCRIBE DETAIL {self.sql_name}").collect()[0]


def _try_commit(commit: Callable[[], object], note: str) -> None:
    """Commit, and retry if another writer's commit conflicts.

    Raise ``CommitRefusedError`` if Delta refuses the commit.
    """

    def commit_or_refuse() -> None:
        try:
            commit()
        except Exception as error:
            if _REFUSED in str(error):
                raise CommitRefusedError(f"{note}: {cause_of(error)}") from error
            raise

    retried(commit_or_refuse, note, lambda error: _FOREIGN.search(str(error)) is not None)


def retried(
    commit: Callable[[], object], note: str, can_repeat: Callable[[Exception], bool], *, pause_s: float = 0.0
) -> None:
    """Commit, and repeat it after errors that other writers' commits have caused, up to five times in all."""
    for attempt in range(1, _COMMIT_ATTEMPTS + 1):
        try:
            commit()
            return
        except CommitRefusedError:
            raise
        except Exception as error:
            if attempt == _COMMIT_ATTEMPTS or not can_repeat(error):
                raise
            log.warning("%s is retried, because another writer changed the table: %s", note, cause_of(error))
            time.sleep(pause_s)


def _commit(row: "Row") -> Commit:
    return Commit(
        version=int(row["version"]),
        rows=_rows_added(row["operationMetrics"]),
        operation=str(row["operation"]),
        note=row["userMetadata"] or "",
    )


def _rows_added(metrics: Mapping[str, str]) -> int | None:
    # A merge also counts rows that it only copied from file to file as written.
    rows = metrics.get("numTargetRowsInserted", metrics.get("numOutputRows"))
    return None if rows is None else int(rows)


def _all_names(kind: "DataType") -> list[str]:
    from pyspark.sql.types import ArrayType, MapType, StructType

    match kind:
        case StructType():
            return [name for field in kind.fields for name in (field.name, *_all_names(field.dataType))]
        case ArrayType():
            return _all_names(kind.elementType)
        case MapType():
            return [*_all_names(kind.keyType), *_all_names(kind.valueType)]
        case _:
            return []
