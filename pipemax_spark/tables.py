"""Tables in and out: reading sources, and committing to a Delta table so that a repeated commit changes nothing."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from pipemax_spark.errors import JobError

_FORMATS_BY_SUFFIX = {
    ".parquet": "parquet",
    ".csv": "csv",
    ".json": "json",
    ".jsonl": "json",
    ".ndjson": "json",
}
_SPEC_PROPERTY = "pipemax.spec."


def is_path(name: str) -> bool:
    """A path rather than a table's name."""
    return "/" in name or name.startswith(".") or PurePosixPath(name).suffix in _FORMATS_BY_SUFFIX


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """The rows to annotate, pinned to one version where the format has versions."""

    rows: Any
    description: str
    version: int | None = None


def read_source(
    spark: Any, name: str, *, file_format: str | None = None, options: Mapping[str, str] | None = None
) -> Source:
    """``JobError`` where there is no such table or it cannot be read."""
    from pyspark.errors import AnalysisException

    options = dict(options or {})
    chosen = file_format or (_FORMATS_BY_SUFFIX.get(PurePosixPath(name).suffix) if is_path(name) else None)
    try:
        if chosen not in (None, "delta"):
            defaults = {"header": "true", "multiLine": "true", "escape": '"'} if chosen == "csv" else {}
            rows = spark.read.format(chosen).options(**{**defaults, **options}).load(name)
            return Source(rows=rows, description=f"{chosen} {name}")
        target = DeltaTarget(name)
        if is_path(name) and not target.exists(spark):
            raise JobError(
                f"input {name!r} holds no Delta table; for files, give --input-format parquet, csv or json"
            )
        version = target.version(spark)
        reader = spark.read.format("delta").options(**options).option("versionAsOf", version)
        rows = reader.load(name) if is_path(name) else reader.table(name)
        return Source(rows=rows, description=f"Delta {name} at version {version}", version=version)
    except AnalysisException as error:
        raise JobError(f"input {name!r} cannot be read: {_first_line(error)}") from error


@dataclass(frozen=True, slots=True)
class DeltaTarget:
    """A Delta table by path or by name, whether or not it exists yet."""

    name: str

    @property
    def sql_name(self) -> str:
        return f"delta.`{self.name}`" if is_path(self.name) else self.name

    def exists(self, spark: Any) -> bool:
        from delta.tables import DeltaTable

        if is_path(self.name):
            return bool(DeltaTable.isDeltaTable(spark, self.name))
        return bool(spark.catalog.tableExists(self.name))

    def read(self, spark: Any) -> Any:
        return spark.read.format("delta").load(self.name) if is_path(self.name) else spark.table(self.name)

    def version(self, spark: Any) -> int:
        return int(spark.sql(f"DESCRIBE HISTORY {self.sql_name} LIMIT 1").head()["version"])

    def table_id(self, spark: Any) -> str:
        return str(spark.sql(f"DESCRIBE DETAIL {self.sql_name}").head()["id"])

    def location(self, spark: Any) -> str:
        return str(spark.sql(f"DESCRIBE DETAIL {self.sql_name}").head()["location"])

    def specs(self, spark: Any) -> dict[str, dict[str, Any]]:
        """spec_hash → spec, of every job that has written here."""
        properties = spark.sql(f"DESCRIBE DETAIL {self.sql_name}").head()["properties"]
        return {
            name.removeprefix(_SPEC_PROPERTY): json.loads(value)
            for name, value in properties.items()
            if name.startswith(_SPEC_PROPERTY)
        }

    def prepare(self, spark: Any, schema: Any, spec_hash: str, spec: Mapping[str, Any]) -> None:
        """Create the table where it is missing, and write down the spec. Before any chunk runs: a change of
        properties would conflict with a commit beside it."""
        if not self.exists(spark):
            self._write(spark.createDataFrame([], schema), {})
        if spec_hash not in self.specs(spark):
            value = json.dumps(spec, sort_keys=True).replace("\\", "\\\\").replace("'", "\\'")
            spark.sql(
                f"ALTER TABLE {self.sql_name} SET TBLPROPERTIES ('{_SPEC_PROPERTY}{spec_hash}' = '{value}')"
            )

    def commit(self, rows: Any, *, application_id: str, number: int, note: str) -> None:
        """Append, once: Delta drops a second append of the same ``application_id`` and ``number``."""
        options = {
            "txnAppId": application_id,
            "txnVersion": str(number),
            "userMetadata": note,
            "mergeSchema": "true",
        }
        try:
            self._write(rows, options)
        except Exception as error:
            # Two writers of one pair: the other one's rows are these.
            if "ConcurrentTransactionException" not in str(error):
                raise

    def rows_committed(self, spark: Any, note_prefix: str) -> int:
        """Rows appended by commits whose note begins so, from Delta's own history."""
        history = spark.sql(f"DESCRIBE HISTORY {self.sql_name}")
        metrics = (
            history.where(history.userMetadata.startswith(note_prefix)).select("operationMetrics").collect()
        )
        return sum(int(row[0].get("numOutputRows", 0)) for row in metrics)

    def _write(self, rows: Any, options: Mapping[str, str]) -> None:
        writer = rows.write.format("delta").mode("append").options(**options)
        writer.save(self.name) if is_path(self.name) else writer.saveAsTable(self.name)


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0]
