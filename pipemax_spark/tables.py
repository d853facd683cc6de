"""A Delta table by path or name: reading it, and committing to it so that a repeated commit changes nothing.

Plain SQL and the DataFrame API, so the Python package of Delta is not needed beside its jars. Knows nothing of
annotations but the names of the table properties.
"""

import json
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import PurePosixPath
from typing import Any

from pipemax_spark.errors import JobError
from pipemax_spark.hadoop import HadoopFiles, plain_path

log = logging.getLogger(__name__)

SPEC_PROPERTY = "pipemax.spec."
RUN_PROPERTY = "pipemax.run"
"""The run that may commit. Setting it is a change of metadata, on which every append that began before fails:
a job that was paused while another took over cannot commit its rows a second time."""

_FILE_SUFFIXES = (".parquet", ".csv", ".json", ".jsonl", ".ndjson", ".gz")


def is_path(name: str) -> bool:
    """A path rather than a table's name."""
    return "/" in name or name.startswith(".") or PurePosixPath(name).suffix in _FILE_SUFFIXES


@dataclass(frozen=True, slots=True, kw_only=True)
class Transaction:
    """Names one append: Delta drops a second one of the same ``app_id`` with this or a lower ``version``.

    So the appends of one ``app_id`` must be made one after the other, in ascending order.
    """

    app_id: str
    version: int
    note: str
    """Found again in the table's history."""


class DeltaTable:
    """A table that may not exist yet."""

    def __init__(self, spark: Any, name: str) -> None:
        self._spark = spark
        self._by_path = is_path(name)
        self.name = plain_path(name)

    @property
    def sql_name(self) -> str:
        if self._by_path:
            return f"delta.`{self.name.replace('`', '``')}`"
        return self.name if "`" in self.name else ".".join(f"`{part}`" for part in self.name.split("."))

    def exists(self) -> bool:
        """False also for tables and views that are not Delta's."""
        if self._by_path:
            return HadoopFiles(self._spark).exists(f"{self.name}/_delta_log")
        if not self._spark.catalog.tableExists(self.name):
            return False
        rows = self._spark.sql(f"DESCRIBE TABLE EXTENDED {self.sql_name}").collect()
        return any(row["col_name"] == "Provider" and row["data_type"].lower() == "delta" for row in rows)

    def read(self, *, version: int | None = None, options: Mapping[str, str] | None = None) -> Any:
        reader = self._spark.read.format("delta").options(**(options or {}))
        if version is not None:
            reader = reader.option("versionAsOf", version)
        return reader.load(self.name) if self._by_path else reader.table(self.name)

    def read_stream(self, options: Mapping[str, str]) -> Any:
        """Its rows of now, and then what is appended, as a streaming DataFrame."""
        reader = self._spark.readStream.format("delta").options(**options)
        return reader.load(self.name) if self._by_path else reader.table(self.name)

    def version(self) -> int:
        return int(self._spark.sql(f"DESCRIBE HISTORY {self.sql_name} LIMIT 1").head()["version"])

    def table_id(self) -> str:
        return str(self._identity["id"])

    def location(self) -> str:
        return plain_path(str(self._identity["location"]))

    def properties(self) -> dict[str, str]:
        return dict(self._detail()["properties"])

    def create(self, schema: Any) -> None:
        """An empty table. ``JobError`` where something else is in its place."""
        from pyspark.errors import AnalysisException

        # Parquet's own names may not hold these; with column mapping Delta keeps them in its schema alone.
        is_mapped = any(re.search(r"[ ,;{}()\n\t=]", name) for name in _all_names(schema))
        mapping = {"delta.columnMapping.mode": "name"} if is_mapped else {}
        try:
            self._append(self._spark.createDataFrame([], schema), mapping)
        except AnalysisException as error:
            raise JobError(
                f"output {self.name!r} cannot be created: {str(error).splitlines()[0]}; name another one"
            ) from error

    def add_columns(self, schema: Any) -> None:
        """Add the columns and nested fields that the table lacks. ``JobError`` where types do not go together."""
        from pyspark.errors import AnalysisException

        try:
            self._append(self._spark.createDataFrame([], schema), {"mergeSchema": "true"})
        except AnalysisException as error:
            raise JobError(
                f"output {self.name!r} cannot take these rows: {str(error).splitlines()[0]}; name another output"
            ) from error

    def set_properties(self, properties: Mapping[str, str]) -> None:
        assignments = ", ".join(f"{_literal(key)} = {_literal(value)}" for key, value in properties.items())
        self._spark.sql(f"ALTER TABLE {self.sql_name} SET TBLPROPERTIES ({assignments})")

    def append(self, rows: Any, transaction: Transaction) -> None:
        """Commit the rows; evaluates ``rows`` once. Of a pair that was committed before, nothing is added."""
        options = {
            "txnAppId": transaction.app_id,
            "txnVersion": str(transaction.version),
            "userMetadata": transaction.note,
        }
        try:
            self._append(rows, options)
        except Exception as error:
            if "ConcurrentTransactionException" not in str(error):
                raise
            # Two writers of one pair, and the other was first: its rows are these.
            log.info("%s was committed by another writer", transaction.note)

    def rows_committed(self, note_prefix: str, *, since_version: int) -> int:
        """Rows of the commits after ``since_version`` whose notes begin so, by Delta's own history."""
        commits = self.version() - since_version
        if commits <= 0:
            return 0
        history = self._spark.sql(f"DESCRIBE HISTORY {self.sql_name} LIMIT {commits}")
        ours = (
            history.where(history.userMetadata.startswith(note_prefix)).select("operationMetrics").collect()
        )
        return sum(int(row[0]["numOutputRows"]) for row in ours)

    def delete(self, condition: str) -> int:
        """How many rows went."""
        return int(
            self._spark.sql(f"DELETE FROM {self.sql_name} WHERE {condition}").head()["num_affected_rows"]
        )

    def _append(self, rows: Any, options: Mapping[str, str]) -> None:
        writer = rows.write.format("delta").mode("append").options(**options)
        if self._by_path:
            writer.save(self.name)
        else:
            writer.saveAsTable(self.name)

    @cached_property
    def _identity(self) -> Any:
        """Details of which id and location never change: each look is a Spark job."""
        return self._detail()

    def _detail(self) -> Any:
        return self._spark.sql(f"DESCRIBE DETAIL {self.sql_name}").head()


def _all_names(kind: Any) -> list[str]:
    match kind.typeName():
        case "struct":
            return [name for field in kind.fields for name in (field.name, *_all_names(field.dataType))]
        case "array":
            return _all_names(kind.elementType)
        case "map":
            return [*_all_names(kind.keyType), *_all_names(kind.valueType)]
        case _:
            return []


def _literal(text: str) -> str:
    """A SQL string. JSON's own escapes would be read by SQL too, hence the doubled backslashes."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def spec_texts(properties: Mapping[str, str]) -> dict[str, str]:
    """spec_hash → what ``spec_property`` wrote down, the latest last."""
    found = {
        name.removeprefix(SPEC_PROPERTY): json.loads(value)
        for name, value in properties.items()
        if name.startswith(SPEC_PROPERTY)
    }
    return {
        spec_hash: entry["spec"]
        for spec_hash, entry in sorted(found.items(), key=lambda item: str(item[1]["since"]))
    }


def spec_property(spec_hash: str, spec_text: str, since: str) -> dict[str, str]:
    """The property that keeps a spec; ``since`` orders them."""
    return {f"{SPEC_PROPERTY}{spec_hash}": json.dumps({"since": since, "spec": spec_text})}
