"""An Iceberg table by ``catalog.schema.table``: read it, and commit to it under the same fence as Delta.

Spark writes a commit's files to a branch of the table that only this commit has, so readers do not see them. The
driver then commits the branch's files to the main branch under the fence (``iceberg_commits``), and drops the branch. A
process that dies in between leaves a branch, which a later claim drops; ``expire_snapshots`` then deletes its files.

A version of the table is Iceberg's sequence number, which grows with every snapshot of the table.
"""

import contextlib
import logging
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipemax_spark.errors import CommitRefusedError, JobError, JobFailedError, OnDelete, cause_of
from pipemax_spark.spark.sql import quoted
from pipemax_spark.storage.conforming import conformed_rows
from pipemax_spark.storage.hadoop import plain_path
from pipemax_spark.storage.iceberg_catalog import IcebergCatalog, missing_columns
from pipemax_spark.storage.iceberg_commits import (
    NOTE,
    RETRY_PAUSE_S,
    ROWS,
    can_fence,
    commit_fenced,
    is_conflict,
    is_lost_race,
    last_number,
)
from pipemax_spark.storage.partition_values import ChangedValues, changed_in_iceberg
from pipemax_spark.storage.tables import KEY, Commit, CommitHistory, Replaced, Transaction, retried

if TYPE_CHECKING:
    from py4j.java_gateway import JavaObject
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

log = logging.getLogger(__name__)

_STAGING = "pipemax-"
_VIEW = "pipemax_replaced"
_SOURCE = "source-snapshot-id"
"""Iceberg's mark of a snapshot whose files come from another one: an expiry of the other one keeps the files."""
_PINS = ("versionasof", "snapshot-id", "tag", "branch", "timestampasof", "as-of-timestamp")
"""Read options that choose a snapshot, of this Iceberg release and earlier ones, in lower case."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Staged:
    """A snapshot in a branch: rows that are written and not yet committed."""

    snapshot_id: int
    files: "Sequence[JavaObject]"

    @property
    def rows(self) -> int:
        return sum(int(file.recordCount()) for file in self.files)


class IcebergTable(CommitHistory):
    """A table that may not exist yet."""

    format_name = "Iceberg"
    takes_one_append_at_a_time = False
    fills_columns = False

    def __init__(self, spark: "SparkSession", name: str) -> None:
        self._spark = spark
        self.name = name
        self._catalog = IcebergCatalog.of(spark, name)
        self._commits = threading.Lock()  # this run's own commits need not race each other

    @property
    def sql_name(self) -> str:
        return self._catalog.sql_name

    def exists(self) -> bool:
        return self._catalog.exists()

    def check_usable(self, *, replaces: str | None) -> None:
        """Raise ``JobError`` if the table cannot be a job's output; ``replaces`` is the option to replace rows."""
        if not can_fence(self._spark):
            raise JobError(f"output {self.name!r} is an Iceberg table, which needs Iceberg 1.11 or newer")
        if (whole := self._catalog.is_part_of()) is not None:
            raise JobError(
                f"output {self.name!r} is a branch, tag or snapshot of {whole}, and the job commits to a table's main "
                "branch only; give the table's name"
            )
        if not self.exists():
            return
        table = self._catalog.load()
        properties = table.properties()
        if table.operations().current().formatVersion() < 2:
            raise JobError(
                f"output {self.name!r} is an Iceberg table of format version 1; upgrade it: ALTER TABLE "
                f"{self.sql_name} SET TBLPROPERTIES ('format-version' = '2')"
            )
        wap = [name for name in ("spark.wap.id", "spark.wap.branch") if self._spark.conf.get(name, None)]
        if wap and properties.get("write.wap.enabled") == "true":
            raise JobError(
                f"{wap[0]} is set and output {self.name!r} has write.wap.enabled, but the job commits to the main "
                "branch; unset one of them"
            )
        for mode in ("write.delete.mode", "write.update.mode") if replaces else ():
            needed = mode == "write.delete.mode" or replaces == f"--on-delete {OnDelete.MARK}"
            if needed and properties.get(mode) == "merge-on-read":
                raise JobError(
                    f"output {self.name!r} has {mode} 'merge-on-read', but {replaces} needs to replace rows by "
                    "copy-on-write; set that property to 'copy-on-write'"
                )

    def stored(self, schema: "StructType") -> "StructType":
        """Return the schema with the types in which Iceberg keeps its columns: it has no 8- and 16-bit integers."""
        try:
            return self._catalog.stored(schema)
        except Exception as error:
            raise JobError(
                f"output {self.name!r} is an Iceberg table, which cannot keep the input's columns: {cause_of(error)}"
            ) from error

    def changed_values(self, schema: "StructType") -> list[ChangedValues]:
        """Return the values of rows of this schema that the table, which exists, would not keep as they are."""
        return changed_in_iceberg(schema, self._catalog.identity_columns())

    def read(
        self,
        *,
        version: int | None = None,
        options: Mapping[str, str] | None = None,
        session: "SparkSession | None" = None,
    ) -> "DataFrame":
        """Return the table's rows, as a DataFrame of ``session`` if that is given."""
        session = session or self._spark
        # The session may know an older state of the table than its catalog has.
        session.catalog.refreshTable(self.sql_name)
        reader = session.read.options(**(options or {}))
        if version is None:
            return reader.table(self.sql_name)
        snapshot_id = self._catalog.snapshot_at(version)
        if snapshot_id is None:  # the table had no snapshot then
            return session.createDataFrame([], reader.table(self.sql_name).schema)
        return reader.option("versionAsOf", str(snapshot_id)).table(self.sql_name)

    def pinned(self, options: Mapping[str, str]) -> "tuple[DataFrame, int | None]":
        """Return the rows of the present snapshot, or of the one that read options name, and the snapshot's id."""
        lowered = {name.lower(): value for name, value in options.items()}
        snapshot_id = self._catalog.snapshot_named({name: lowered[name] for name in _PINS if name in lowered})
        if snapshot_id is None:
            return self.read(options=options), None
        others = {name: value for name, value in options.items() if name.lower() not in _PINS}
        return self.read(options={**others, "versionAsOf": str(snapshot_id)}), snapshot_id

    def is_pinned(self, options: Mapping[str, str]) -> bool:
        """Tell whether read options choose a snapshot."""
        return any(name.lower() in _PINS for name in options)

    def version(self) -> int:
        return int(self._catalog.load().operations().current().lastSequenceNumber())

    def table_id(self) -> str:
        return str(self._catalog.load().uuid().toString())

    def location(self) -> str:
        return plain_path(str(self._catalog.load().location()))

    def properties(self) -> dict[str, str]:
        return {str(name): str(value) for name, value in self._catalog.load().properties().items()}

    def create(self, schema: "StructType") -> None:
        """Create an empty table. Raise ``JobError`` if that is impossible."""
        try:
            self.no_rows(schema).writeTo(self.sql_name).using("iceberg").create()
        except Exception as error:
            if self.exists():  # another run has created it at this moment
                return
            raise JobError(
                f"output {self.name!r} cannot be created: {cause_of(error)}; name another one"
            ) from error

    def add_columns(self, schema: "StructType") -> None:
        """Add the columns and nested fields that the table lacks. Raise ``JobError`` if it cannot take such rows."""
        try:
            missing = missing_columns(self.stored(schema), self.read().schema)
            if missing:
                self._catalog.add_columns(missing)
        except JobError:
            raise
        except Exception as error:
            raise JobError(
                f"output {self.name!r} cannot take these rows: {cause_of(error)}; name another output"
            ) from error

    def no_rows(self, schema: "StructType") -> "DataFrame":
        """Return an empty DataFrame with this schema."""
        return self._spark.createDataFrame([], schema)

    def set_properties(self, properties: Mapping[str, str]) -> None:
        change = self._catalog.load().updateProperties()
        for name, value in properties.items():
            change.set(name, value)
        change.commit()

    def append(self, rows: "DataFrame", transaction: Transaction) -> None:
        """Commit the rows, which are evaluated once. Raise ``CommitRefusedError`` if the fence refuses them.

        A commit that is fenced off before it begins is skipped, as Delta does; ``find_commit`` shows it.
        """
        if self._is_fenced_off(transaction):
            return
        with self._told_if_fenced_off(transaction), self._staged(transaction) as branch:
            # Within the branch's life: without it, an expiry of snapshots would delete the files before the commit.
            self._commit(transaction, self._write(rows, branch))

    def append_nothing(self, transaction: Transaction, schema: "StructType | None" = None) -> None:
        """Commit the transaction without rows, and drop the branches that earlier runs left."""
        self._commit(transaction, None)
        for name in self._catalog.load().refs().keySet():
            left = str(name).removeprefix(_STAGING).partition("-")[0]
            if str(name).startswith(_STAGING) and left.isdecimal() and int(left) < transaction.version:
                self._drop(str(name))

    def session_for_replacing(self) -> "SparkSession":
        """Return the session for ``replace``: this one, because a new one lacks catalogs that were set in this one."""
        return self._spark

    def replace(
        self, session: "SparkSession", rows: "DataFrame | None", replaced: Replaced, transaction: Transaction
    ) -> None:
        """Commit the rows, if any, and delete or change the ones that they replace, in one snapshot.

        Refused as in ``append``.

        Tried again if another writer changed the same files meanwhile.
        """
        retried(lambda: self._replace(session, rows, replaced, transaction), transaction.note, is_conflict)

    def compact(self) -> tuple[int, int]:
        """Join small files by Iceberg's ``rewrite_data_files``; return the numbers of files before and after."""
        return self._catalog.rewrite_data_files()

    def history(self, since_version: int, *, expected: int = 0) -> Iterator[Commit | None]:
        """Yield the main branch's commits, as in ``CommitHistory``, however many are ``expected``."""
        table = self._catalog.load()
        snapshot = table.currentSnapshot()
        while snapshot is not None and snapshot.sequenceNumber() > since_version:
            yield _commit(snapshot)
            parent = snapshot.parentId()
            if parent is None:
                return
            snapshot = table.snapshot(parent)
            if snapshot is None:
                yield None

    def _commit(self, transaction: Transaction, staged: "_Staged | None") -> None:
        def begin(pending: "JavaObject") -> "JavaObject":
            change = pending.newAppend()
            for file in () if staged is None else staged.files:
                change.appendFile(file)
            return change

        source = None if staged is None else staged.snapshot_id
        self._commit_change(transaction, begin, rows=0 if staged is None else staged.rows, source=source)

    def _commit_change(
        self,
        transaction: Transaction,
        begin: "Callable[[JavaObject], JavaObject]",
        *,
        rows: int,
        source: int | None,
    ) -> None:
        """Commit the change; ``source`` is the staged snapshot from which its files come."""
        summary = {ROWS: str(rows)} | ({} if source is None else {_SOURCE: str(source)})
        with self._commits:
            try:
                self._catalog.allow_callbacks()
                commit_fenced(self._catalog.load, transaction, begin=begin, summary=summary)
            except CommitRefusedError:
                # A commit whose first attempt had landed unnoticed is not refused but done.
                if self.find_commit(transaction.note, since_version=0) is None:
                    raise

    def _is_fenced_off(self, transaction: Transaction) -> bool:
        """Tell whether the fence would refuse the commit now, before its rows are computed."""
        known = last_number(self._catalog.load(), transaction.app_id)
        return known is not None and known >= transaction.version

    @contextlib.contextmanager
    def _told_if_fenced_off(self, transaction: Transaction) -> Iterator[None]:
        """Raise ``CommitRefusedError`` in place of any error of a commit that another run's claim overtook.

        The claim drops the commit's branch, so the commit may fail in several places.
        """
        try:
            yield
        except CommitRefusedError:
            raise
        except Exception as error:
            if self._is_fenced_off(transaction):
                raise CommitRefusedError(f"{transaction.note}: {cause_of(error)}") from error
            raise

    def _replace(
        self, session: "SparkSession", rows: "DataFrame | None", replaced: Replaced, transaction: Transaction
    ) -> None:
        if self._is_fenced_off(transaction):
            return
        if rows is not None and replaced.kept is not None:
            rows = rows.unionByName(replaced.kept, allowMissingColumns=True)
        view = f"{_VIEW}_{uuid.uuid4().hex[:12]}"
        with self._told_if_fenced_off(transaction), self._staged(transaction) as branch:
            base = _head(self._catalog.load(), branch)
            session.catalog.refreshTable(self.sql_name)
            replaced.keys.createOrReplaceTempView(view)
            try:
                name, assigned = f"{self._branch_name(branch)} AS t", replaced.assigned
                change = f"DELETE FROM {name}" if assigned is None else f"UPDATE {name} SET {assigned}"
                session.sql(
                    f"{change} WHERE {replaced.condition} "
                    f"AND EXISTS (SELECT 1 FROM {view} AS s WHERE s.{KEY} = {replaced.key})"
                )
            finally:
                session.catalog.dropTempView(view)
            table = self._catalog.load()
            deleted = _head(table, branch)
            if deleted.snapshotId() == base.snapshotId():  # there was nothing to delete
                self._commit(transaction, None if rows is None else self._write(rows, branch))
                return
            assert deleted.parentId() == base.snapshotId(), f"branch {branch} was changed by another process"
            source = int(deleted.snapshotId())
            added = None if rows is None else self._write(rows, branch, source=source)
            io = table.io()
            gone = [*deleted.removedDataFiles(io).iterator()]
            gone_deletes = [*deleted.removedDeleteFiles(io).iterator()]
            kept = _added(table, deleted)

            def begin(pending: "JavaObject") -> "JavaObject":
                change = pending.newOverwrite()
                self._catalog.delete_files(change, gone, gone_deletes)
                for file in (*kept, *(() if added is None else added.files)):
                    change.addFile(file)
                return change.validateFromSnapshot(base.snapshotId()).validateNoConflictingDeletes()

            num_rows = 0 if added is None else added.rows
            self._commit_change(transaction, begin, rows=num_rows, source=source)

    @contextlib.contextmanager
    def _staged(self, transaction: Transaction) -> Iterator[str]:
        """Yield the name of a branch of the table's present state, which is dropped at exit."""
        name = f"{_STAGING}{transaction.version}-{uuid.uuid4().hex[:12]}"
        self._change_branch(name, lambda snapshots: snapshots.createBranch(name))
        try:
            yield name
        finally:
            self._drop(name)

    def _drop(self, branch: str) -> None:
        try:
            self._change_branch(branch, lambda snapshots: snapshots.removeBranch(branch))
        except Exception:  # the next claim drops it
            log.warning("branch %s of %s could not be dropped", branch, self.name, exc_info=True)

    def _change_branch(self, branch: str, change: "Callable[[JavaObject], JavaObject]") -> None:
        with self._commits:
            retried(
                lambda: change(self._catalog.load().manageSnapshots()).commit(),
                branch,
                is_lost_race,
                pause_s=RETRY_PAUSE_S,
            )

    def _write(self, rows: "DataFrame", branch: str, *, source: int | None = None) -> "_Staged":
        """Append the rows to the branch and return their files.

        ``source`` is an earlier snapshot of the branch that will be committed with these.
        """
        before = _head(self._catalog.load(), branch)
        session = rows.sparkSession
        session.catalog.refreshTable(self.sql_name)
        shaped = conformed_rows(rows, session.read.table(self.sql_name).schema)
        # No shuffle after the rows are annotated: the job follows the tasks that annotate, and each row is final.
        options = {"use-table-distribution-and-ordering": "false", "fanout-enabled": "true"}
        if source is not None:
            options[f"snapshot-property.{_SOURCE}"] = str(source)
        # Not by the option "branch", which Iceberg 1.12 ignores here: the rows would go to the main branch.
        shaped.writeTo(self._branch_name(branch)).options(**options).append()
        table = self._catalog.load()
        written = _head(table, branch)
        if written.parentId() != before.snapshotId():
            raise JobFailedError(
                f"rows for {self.name} were written, but not to branch {branch}; nothing of them is committed as done"
            )
        return _Staged(snapshot_id=int(written.snapshotId()), files=_added(table, written))

    def _branch_name(self, branch: str) -> str:
        return f"{self.sql_name}.{quoted(f'branch_{branch}')}"


def _head(table: "JavaObject", branch: str) -> "JavaObject":
    return table.snapshot(table.refs().get(branch).snapshotId())


def _added(table: "JavaObject", snapshot: "JavaObject") -> "list[JavaObject]":
    return [*snapshot.addedDataFiles(table.io()).iterator()]


def _commit(snapshot: "JavaObject") -> Commit:
    summary = snapshot.summary()
    rows = summary.get(ROWS)
    return Commit(
        version=int(snapshot.sequenceNumber()),
        rows=None if rows is None else int(rows),
        operation=str(snapshot.operation()),
        note=summary.get(NOTE) or "",
    )
