"""One table of an Iceberg catalog through Iceberg's Java API, which every Spark session with Iceberg has.

The catalog here is our own instance of the session's: the session's keeps tables and shares them between threads, and
Iceberg's transactions must not share a table.
"""

import json
import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from pipemax_spark.errors import JobError
from pipemax_spark.request.prompts import find_field
from pipemax_spark.spark.sql import literal, quoted

if TYPE_CHECKING:
    from collections.abc import Iterator

    from py4j.java_gateway import JavaObject
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import DataType, StructType

CATALOG_CLASSES = "org.apache.iceberg.spark."
_SETTINGS = "spark.sql.catalog."
_CHANGES = "pipemax_changes"
_PART_OF_TABLE = re.compile("(branch|tag|snapshot_id|at_timestamp)_.+", re.IGNORECASE)
"""What Iceberg takes behind a table's name: ``db.t.branch_nightly``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TableName:
    """A table's name, with its catalog."""

    catalog: str
    namespace: tuple[str, ...]
    table: str

    @classmethod
    def of(cls, spark: "SparkSession", name: str) -> "TableName":
        """Resolve the name as Spark does: by the session's present catalog and namespace where it leaves them out."""
        state: Any = spark._jsparkSession.sessionState()
        parsed = state.sqlParser().parseMultipartIdentifier(name)
        parts = [str(parsed.apply(place)) for place in range(parsed.length())]
        manager = state.catalogManager()
        if len(parts) > 1 and manager.isCatalogRegistered(parts[0]):
            catalog, *rest = parts
        else:
            catalog, rest = str(manager.currentCatalog().name()), parts
        if len(rest) == 1:
            rest = [*map(str, manager.currentNamespace()), *rest]
        return cls(catalog=catalog, namespace=tuple(rest[:-1]), table=rest[-1])


def is_in_iceberg_catalog(spark: "SparkSession", name: str) -> bool:
    """Tell whether a table that is created under this name becomes an Iceberg table."""
    catalog = TableName.of(spark, name).catalog
    return (spark.conf.get(f"{_SETTINGS}{catalog}", None) or "").startswith(CATALOG_CLASSES)


class IcebergCatalog:
    """The catalog of one table, and what is asked of it about that table."""

    def __init__(self, spark: "SparkSession", name: TableName) -> None:
        self._spark = spark
        self._jvm: Any = spark._jvm
        self._name = name

    @classmethod
    def of(cls, spark: "SparkSession", name: str) -> "IcebergCatalog":
        return cls(spark, TableName.of(spark, name))

    @property
    def sql_name(self) -> str:
        return ".".join(
            quoted(part) for part in (self._name.catalog, *self._name.namespace, self._name.table)
        )

    def exists(self) -> bool:
        return bool(self._catalog.tableExists(self._identifier))

    def is_part_of(self) -> str | None:
        """Return the name of the table of which this name means a branch, tag, snapshot or time; None if of none."""
        name = self._name
        if not name.namespace or not _PART_OF_TABLE.fullmatch(name.table):
            return None
        whole = replace(name, namespace=name.namespace[:-1], table=name.namespace[-1])
        table = IcebergCatalog(self._spark, whole)
        return table.sql_name if whole.namespace and table.exists() else None

    def load(self) -> "JavaObject":
        """Return the table in its present state, which no other thread has."""
        return self._catalog.loadTable(self._identifier)

    def stored(self, schema: "StructType") -> "StructType":
        """Return the schema as Spark reads it from an Iceberg table that was made with it."""
        from pyspark.sql.types import StructType

        convert = self._jvm.org.apache.iceberg.spark.SparkSchemaUtil.convert
        kept = convert(convert(self._spark._jsparkSession.parseDataType(schema.json())))
        return StructType.fromJson(json.loads(kept.json()))

    def identity_columns(self) -> list[str]:
        """Return the columns by whose values, as they are, the table is partitioned; a nested one by its path."""
        table = self.load()
        fields = table.spec().fields()
        sources = (fields.get(place) for place in range(fields.size()))
        return [
            str(table.schema().findColumnName(source.sourceId()))
            for source in sources
            if source.transform().isIdentity()
        ]

    def snapshot_at(self, version: int) -> int | None:
        """Return the id of the snapshot that was the table's state at this sequence number; None if it had none."""
        table = self.load()
        snapshot = table.currentSnapshot()
        while snapshot is not None and snapshot.sequenceNumber() > version:
            parent = snapshot.parentId()
            if parent is None:
                return None
            snapshot = table.snapshot(parent)
            if snapshot is None:
                raise JobError(f"snapshot {parent} of {self.sql_name} has expired; run the job again")
        return None if snapshot is None else int(snapshot.snapshotId())

    def operations_between(self, since: int, until: int) -> list[str] | None:
        """Return what the snapshots after ``since`` did, up to ``until``; None if the one is not before the other."""
        table, operations = self.load(), []
        snapshot = table.snapshot(until)
        while snapshot is not None and snapshot.snapshotId() != since:
            operations.append(str(snapshot.operation()))
            parent = snapshot.parentId()
            snapshot = None if parent is None else table.snapshot(parent)
        return None if snapshot is None else operations

    def changelog(self, pins: Mapping[str, str], id_columns: Sequence[str]) -> "DataFrame":
        """Return the rows before and after each change between two snapshots, without those that only moved."""
        view, name = f"{_CHANGES}_{uuid.uuid4().hex[:12]}", self.sql_name
        options = ", ".join(f"{literal(key)}, {literal(value)}" for key, value in pins.items())
        ids = ", ".join(literal(column) for column in id_columns)
        self._spark.catalog.refreshTable(name)
        self._spark.sql(
            f"CALL {quoted(self._name.catalog)}.system.create_changelog_view(table => {literal(name)}, "
            f"changelog_view => '{view}', options => map({options}), identifier_columns => array({ids}))"
        )
        try:
            return self._spark.table(view)
        finally:
            self._spark.catalog.dropTempView(view)

    def snapshot_named(self, pins: Mapping[str, str]) -> int | None:
        """Return the id of the snapshot that one read option names, or the present one; None if there is none.

        Raise ``JobError`` if there is no such snapshot, or several options name one.
        """
        table = self.load()
        match list(pins.items()):
            case []:
                snapshot = table.currentSnapshot()
                return None if snapshot is None else int(snapshot.snapshotId())
            case [("versionasof" | "snapshot-id" | "tag" | "branch", value)]:
                ref = table.refs().get(value)
                named = table.snapshot(int(value)) if ref is None and value.isdecimal() else ref
                if named is None:
                    raise JobError(f"{self.sql_name} has no snapshot, branch or tag {value}")
                return int(named.snapshotId())
            case _:
                raise JobError(
                    f"input option {' and '.join(pins)}: give one snapshot id, branch or tag, as versionAsOf=VALUE"
                )

    def add_columns(self, columns: "Sequence[tuple[tuple[str, ...], DataType]]") -> None:
        """Add columns, each by its path, at the end of the table or of its struct."""
        from_json = self._jvm.org.apache.spark.sql.types.DataType.fromJson
        added = ", ".join(
            f"{'.'.join(map(quoted, path))} {from_json(kind.json()).sql()}" for path, kind in columns
        )
        self._spark.catalog.refreshTable(self.sql_name)
        self._spark.sql(f"ALTER TABLE {self.sql_name} ADD COLUMNS ({added})")

    def delete_files(
        self, change: "JavaObject", files: "Sequence[JavaObject]", delete_files: "Sequence[JavaObject]"
    ) -> None:
        """Let a pending overwrite remove these files."""
        util = self._jvm.org.apache.iceberg.util
        gone, gone_deletes = util.DataFileSet.create(), util.DeleteFileSet.create()
        for file in files:
            gone.add(file)
        for file in delete_files:
            gone_deletes.add(file)
        change.deleteFiles(gone, gone_deletes)

    def allow_callbacks(self) -> None:
        """Let the JVM call Python objects, as PySpark's own ``foreachBatch`` does."""
        from pyspark.java_gateway import ensure_callback_server_started

        ensure_callback_server_started(self._spark.sparkContext._gateway)  # type: ignore[no-untyped-call]

    def rewrite_data_files(self) -> tuple[int, int]:
        """Join the table's small files; return the number of files joined and of those that they became."""
        actions = self._jvm.org.apache.iceberg.spark.actions.SparkActions.get(self._spark._jsparkSession)
        # By default Iceberg leaves fewer than five small files as they are.
        result = actions.rewriteDataFiles(self.load()).option("min-input-files", "2").execute()
        return int(result.rewrittenDataFilesCount()), int(result.addedDataFilesCount())

    @cached_property
    def _catalog(self) -> "JavaObject":
        prefix = f"{_SETTINGS}{self._name.catalog}."
        options = self._jvm.java.util.HashMap()
        for name, value in self._spark.conf.getAll.items():
            if name.startswith(prefix):
                options.put(name.removeprefix(prefix), value)
        options.put("cache-enabled", "false")
        # Iceberg asks for the thread's session, and a thread of a pool has none.
        sessions = getattr(self._jvm, "org.apache.spark.sql.classic.SparkSession")
        sessions.setActiveSession(self._spark._jsparkSession)
        catalog = self._jvm.org.apache.iceberg.spark.SparkCatalog()
        catalog.initialize(
            self._name.catalog, self._jvm.org.apache.spark.sql.util.CaseInsensitiveStringMap(options)
        )
        return catalog.icebergCatalog()

    @cached_property
    def _identifier(self) -> "JavaObject":
        catalog = self._jvm.org.apache.iceberg.catalog
        gateway: Any = self._spark.sparkContext._gateway
        levels = gateway.new_array(self._jvm.java.lang.String, len(self._name.namespace))
        for place, level in enumerate(self._name.namespace):
            levels[place] = level
        return catalog.TableIdentifier.of(catalog.Namespace.of(levels), self._name.table)


def missing_columns(needed: "StructType", known: "StructType") -> "list[tuple[tuple[str, ...], DataType]]":
    """Return the columns and the fields of structs that ``known`` lacks, by their paths.

    Raise ``JobError`` for a difference within an array or a map, to which nothing can be added by name.
    """
    return [*_missing(needed, known, ())]


def _missing(
    needed: "StructType", known: "StructType", path: tuple[str, ...]
) -> "Iterator[tuple[tuple[str, ...], DataType]]":
    from pyspark.sql.types import ArrayType, MapType, StructType

    for field in needed.fields:
        here = (*path, field.name)
        same = find_field(field.name, known)
        if same is None:
            yield here, field.dataType
            continue
        match field.dataType, same.dataType:
            case StructType() as inner, StructType() as of_table:
                yield from _missing(inner, of_table, here)
            case (ArrayType() | MapType()) as kind, of_table if (
                kind.simpleString() != of_table.simpleString()
            ):
                raise JobError(
                    f"column {'.'.join(here)!r} is of type {kind.simpleString()}, and of type "
                    f"{of_table.simpleString()} in the output; name another output"
                )
            case _:
                pass
