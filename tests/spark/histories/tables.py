"""The tables of a history, and what other writers do to them."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.spark.histories.model import Entry, Held, Row, row_of
from tests.spark.spark_work import set_to

NO_CHECK = {"spark.databricks.delta.retentionDurationCheck.enabled": "false"}
"""With which VACUUM may delete files that were removed a moment ago."""


def _version(path: str) -> int:
    """Return the last version of the Delta table at this path."""
    return max(int(file.stem) for file in Path(path, "_delta_log").glob(f"{'[0-9]' * 20}.json"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Version:
    """The input after a step, and what the step did, as far as a reader of appends notices."""

    number: int
    rows: tuple[Row, ...]
    columns: tuple[str, ...]
    appended: tuple[Row, ...] = ()
    changes: bool | None = False
    """Whether it updated or deleted rows; None where that depends on the files."""
    inserts: bool = False
    """It may have inserted rows beside."""
    moves_files: bool = False
    """It rewrote files."""
    deletes_files: bool = False
    changes_schema: bool = False
    """In another way than by a new column."""


@dataclass(slots=True)
class Input:
    """A Delta table of ids, texts and notes."""

    spark: Any
    path: str
    versions: list[Version] = field(default_factory=list)
    restorable: list[Version] = field(default_factory=list)
    is_mapped: bool = False

    @property
    def now(self) -> Version:
        return self.versions[-1]

    def begin(self) -> None:
        """Take the table as it is."""
        self._note(columns=tuple(self.spark.read.format("delta").load(self.path).columns))

    def append(self, rows: list[dict[str, Any]], columns: tuple[str, ...]) -> None:
        self._frame(rows, columns).write.format("delta").mode("append").option("mergeSchema", "true").save(
            self.path
        )
        before = self.versions[-1] if self.versions else None
        all_columns = columns if before is None else tuple(dict.fromkeys((*before.columns, *columns)))
        self._note(columns=all_columns, appended=tuple(map(row_of, rows)))

    def merge(self, rows: list[dict[str, Any]]) -> None:
        """Update the rows whose ids are there, and insert the others."""
        ids = {dict(row)["id"] for row in self.now.rows}
        inserted = tuple(row_of(row) for row in rows if row["id"] not in ids)
        self._frame(rows, ("id", "text")).createOrReplaceTempView("news")
        self.sql(
            "MERGE INTO {} AS t USING news AS s ON t.id = s.id WHEN MATCHED THEN UPDATE SET t.text = s.text "
            "WHEN NOT MATCHED THEN INSERT (id, text) VALUES (s.id, s.text)"
        )
        changes = len(inserted) < len(rows)
        self._note(appended=inserted, changes=changes, inserts=bool(inserted), moves_files=changes)

    def update(self, condition: str, text: str) -> None:
        self.sql(f"UPDATE {{}} SET text = '{text}' WHERE {condition}")
        self._note(changes=True, moves_files=True)

    def delete(self, condition: str) -> None:
        self.sql(f"DELETE FROM {{}} WHERE {condition}")
        self._note(changes=True, moves_files=True)

    def optimize(self) -> None:
        self.sql("OPTIMIZE {}")
        self._note(moves_files=True)

    def vacuum(self) -> None:
        with set_to(self.spark, NO_CHECK):
            self.sql("VACUUM {} RETAIN 0 HOURS")
        self.restorable.clear()
        self._note(deletes_files=True)

    def restore(self, version: Version) -> None:
        before = Counter(self.now.rows)
        self.sql(f"RESTORE TABLE {{}} TO VERSION AS OF {version.number}")
        brought = (Counter(version.rows) - before).elements()
        is_other_schema = version.columns != self.now.columns
        self._note(
            columns=version.columns,
            appended=tuple(brought),
            changes=None,
            inserts=True,
            moves_files=True,
            changes_schema=is_other_schema,
        )

    def map_columns(self) -> None:
        """With column mapping a column can be renamed or dropped."""
        self.sql(
            "ALTER TABLE {} SET TBLPROPERTIES ('delta.columnMapping.mode' = 'name', "
            "'delta.minReaderVersion' = '2', 'delta.minWriterVersion' = '5')"
        )
        self.is_mapped = True
        self.restorable.clear()
        self._note(changes_schema=True)

    def rename(self, name: str, new_name: str) -> None:
        self.sql(f"ALTER TABLE {{}} RENAME COLUMN {name} TO {new_name}")
        columns = tuple(new_name if column == name else column for column in self.now.columns)
        self._note(columns=columns, changes_schema=True)

    def drop(self, name: str) -> None:
        self.sql(f"ALTER TABLE {{}} DROP COLUMN {name}")
        columns = tuple(column for column in self.now.columns if column != name)
        self._note(columns=columns, changes_schema=True)

    def keep_deletions_in_vectors(self) -> None:
        self.sql("ALTER TABLE {} SET TBLPROPERTIES ('delta.enableDeletionVectors' = 'true')")
        self._note(changes_schema=True)  # the table's protocol, which a stream may mind as well

    def sql(self, statement: str) -> None:
        self.spark.sql(statement.format(f"delta.`{self.path}`"))

    def _frame(self, rows: list[dict[str, Any]], columns: tuple[str, ...]) -> Any:
        types = {"id": "long"}
        schema = ", ".join(f"{name} {types.get(name, 'string')}" for name in columns)
        return self.spark.createDataFrame(
            [tuple(row.get(name) for name in columns) for row in rows], schema
        ).coalesce(1)

    def _note(self, *, columns: tuple[str, ...] | None = None, **facts: Any) -> None:
        """Write down the table's state. Its rows are Delta's own, as what other writers do is not under test."""
        rows = self.spark.read.format("delta").load(self.path).collect()
        version = Version(
            number=_version(self.path),
            rows=tuple(row_of(row.asDict()) for row in rows),
            columns=columns or self.now.columns,
            **facts,
        )
        self.versions.append(version)
        self.restorable.append(version)


@dataclass(slots=True)
class Output:
    """A Delta table that jobs fill, and what it held at earlier versions."""

    spark: Any
    name: str
    held: Held = field(default_factory=Counter)
    """What the model says."""
    restorable: list[tuple[int, Held]] = field(default_factory=list)

    @property
    def sql_name(self) -> str:
        return f"delta.`{self.name}`"

    @property
    def exists(self) -> bool:
        return Path(self.name, "_delta_log").exists()

    def actual(self, spec_of: Callable[[str], str]) -> Held:
        """Return what the table holds of jobs' rows; ``spec_of`` tells the spec of a hash."""
        if not self.exists:
            return Counter()
        found: Held = Counter()
        for row in self._rows():
            values = row.asDict(recursive=True)
            annotation = values.pop("annotation", None)
            if annotation is not None:
                error = annotation["error"]
                outcome = annotation["text"] if error is None else str(error["code"])
                found[Entry(spec_of(annotation["spec_hash"]), row_of(values), outcome)] += 1
        return found

    def columns(self) -> set[str]:
        return set(self.spark.table(self.sql_name).columns) if self.exists else set()

    def note(self) -> None:
        """Remember this version, to which the table may be restored."""
        if self.exists:
            self.restorable.append((self._version(), Counter(self.held)))

    def optimize(self) -> None:
        self.spark.sql(f"OPTIMIZE {self.sql_name}")

    def vacuum(self) -> None:
        with set_to(self.spark, NO_CHECK):
            self.spark.sql(f"VACUUM {self.sql_name} RETAIN 0 HOURS")
        self.restorable.clear()

    def restore(self, version: int, held: Held) -> None:
        self.spark.sql(f"RESTORE TABLE {self.sql_name} TO VERSION AS OF {version}")
        self.held = Counter(held)

    def delete(self, entry: Entry) -> None:
        """Delete the rows of this entry's id."""
        key = dict(entry.row)["id"]
        self.spark.sql(f"DELETE FROM {self.sql_name} WHERE id = {key}")
        self.held = Counter({e: n for e, n in self.held.items() if dict(e.row)["id"] != key})

    def append_elsewhere(self) -> None:
        """As another writer does."""
        self.spark.sql(f"INSERT INTO {self.sql_name} (id, text) VALUES (-1, 'somebody else')")

    def alter(self, number: int) -> None:
        self.spark.sql(f"ALTER TABLE {self.sql_name} SET TBLPROPERTIES ('history.step' = '{number}')")

    def add_column(self, number: int) -> None:
        self.spark.sql(f"ALTER TABLE {self.sql_name} ADD COLUMNS (extra_{number} string)")

    def keep_deletions_in_vectors(self) -> None:
        self.spark.sql(
            f"ALTER TABLE {self.sql_name} SET TBLPROPERTIES ('delta.enableDeletionVectors' = 'true')"
        )

    def _rows(self) -> Any:
        return self.spark.read.format("delta").load(self.name).collect()

    def _version(self) -> int:
        return _version(self.name)


@dataclass(slots=True)
class IcebergOutput(Output):
    """The same in an Iceberg catalog: ``name`` is ``catalog.schema.table``."""

    @property
    def sql_name(self) -> str:
        return self.name

    @property
    def exists(self) -> bool:
        return bool(self.spark.catalog.tableExists(self.name))

    def optimize(self) -> None:
        self._call("rewrite_data_files", "options => map('rewrite-all', 'true')")

    def vacuum(self) -> None:
        self._call("expire_snapshots", "older_than => TIMESTAMP '2100-01-01', retain_last => 1")
        self.restorable.clear()

    def restore(self, version: int, held: Held) -> None:
        self._call("rollback_to_snapshot", f"snapshot_id => {version}")
        self.held = Counter(held)

    def keep_deletions_in_vectors(self) -> None:
        self.alter(-1)  # a job that replaces rows refuses tables that are merged on read

    def _rows(self) -> Any:
        self.spark.catalog.refreshTable(self.name)
        return self.spark.table(self.name).collect()

    def _version(self) -> int:
        snapshots = self.spark.sql(f"SELECT snapshot_id FROM {self.name}.refs WHERE name = 'main'").collect()
        return int(snapshots[0][0])

    def _call(self, procedure: str, arguments: str) -> None:
        catalog, _, table = self.name.partition(".")
        self.spark.sql(f"CALL {catalog}.system.{procedure}(table => '{table}', {arguments})")
