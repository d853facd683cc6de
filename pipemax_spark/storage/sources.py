"""Open the rows to annotate: a Delta or Iceberg table, pinned to one version, or Parquet, CSV or JSON files."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from pipemax_spark.errors import JobError, cause_of
from pipemax_spark.storage import openai_batch
from pipemax_spark.storage.hadoop import HadoopFiles
from pipemax_spark.storage.iceberg import IcebergTable
from pipemax_spark.storage.names import exists
from pipemax_spark.storage.output_table import open_table
from pipemax_spark.storage.tables import COMPRESSION_SUFFIXES, FORMATS_BY_SUFFIX, DeltaTable, is_path

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_CSV_OPTIONS = {"header": "true", "multiLine": "true", "escape": '"'}
FORMATS = ("delta", "parquet", "csv", "json", openai_batch.FORMAT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A DataFrame that reads the same rows however often it is evaluated."""

    rows: "DataFrame"
    name: str
    description: str
    version: int | None = None
    """The version of a Delta table or the id of an Iceberg table's snapshot; None for anything else."""
    table_id: str | None = None
    """Unlike its name, the same for one table only; None if there is no version."""
    tells_appends: bool = False
    """Whether ``--incremental`` can follow it: a Delta table."""


def read_source(
    spark: "SparkSession",
    name: str,
    *,
    file_format: str | None = None,
    options: Mapping[str, str] | None = None,
) -> Source:
    """Return the source. Raise ``JobError`` if there is no such table or file, or it cannot be read."""
    from pyspark.errors import AnalysisException

    if file_format is not None and file_format not in FORMATS:
        raise JobError(f"input-format is {file_format!r}; give one of {', '.join(FORMATS)}")
    try:
        if not is_path(name):
            return _read_table(spark, name, options or {})
        path = HadoopFiles(spark).qualified(name)
        return _read_path(spark, path, file_format, options or {})
    except AnalysisException as error:
        raise JobError(f"input {name!r} cannot be read: {cause_of(error)}") from error


def _read_table(spark: "SparkSession", name: str, options: Mapping[str, str]) -> Source:
    if not exists(spark, name):
        raise JobError(
            f"there is no table {name!r}; for files, give a path such as ./{name} or an absolute one"
        )
    table = open_table(spark, name)
    if not table.exists():
        # A view, or a table of another format, is read in its current state.
        return Source(rows=spark.table(name), name=name, description=f"table {name}")
    if isinstance(table, IcebergTable):
        rows, snapshot_id = table.pinned(options)
        told = "no snapshot yet" if snapshot_id is None else f"snapshot {snapshot_id}"
        return Source(
            rows=rows,
            name=name,
            description=f"Iceberg {name}, {told}",
            version=snapshot_id,
            table_id=None if snapshot_id is None else table.table_id(),
        )
    return _pinned(table, options)


def _read_path(
    spark: "SparkSession", path: str, file_format: str | None, options: Mapping[str, str]
) -> Source:
    files = HadoopFiles(spark)
    table = DeltaTable(spark, path)
    if file_format in (None, "delta") and table.exists():
        return _pinned(table, options)
    # Spark resolves a pattern such as /data/*.parquet.
    if not re.search(r"[*?\[{]", path) and not files.exists(path):
        raise JobError(f"input {path!r} does not exist; give a Delta table's path or name, or a file's path")
    if any(entry.name.endswith(".metadata.json") for entry in files.list(f"{path}/metadata")):
        raise JobError(
            f"input {path!r} holds an Iceberg table, which is read by its name: give catalog.schema.table"
        )
    chosen = file_format or _format_of(files, path)
    if chosen is None or chosen == "delta":
        raise JobError(
            f"input {path!r} holds no Delta table, and its format cannot be inferred from the file names; give "
            "--input-format parquet, csv or json"
        )
    if chosen == openai_batch.FORMAT:
        rows = openai_batch.read_requests(spark, path)
        return Source(rows=rows, name=path, description=f"OpenAI's batch file {path}")
    reader_options = {**(_CSV_OPTIONS if chosen == "csv" else {}), **options}
    rows = spark.read.format(chosen).options(**reader_options).load(path)
    return Source(rows=rows, name=path, description=f"{chosen} {path}")


def _pinned(table: DeltaTable, options: Mapping[str, str]) -> Source:
    version = table.version()
    rows = table.read(version=version, options=options)
    return Source(
        rows=rows,
        name=table.name,
        description=f"Delta {table.name}, version {version}",
        version=version,
        table_id=table.table_id(),
        tells_appends=True,
    )


def _format_of(files: HadoopFiles, path: str) -> str | None:
    """Return the format by the path's ending, else by the endings of the files in it."""
    names = [path, *sorted(entry.name for entry in files.list(path) if not entry.name.startswith(("_", ".")))]
    for name in names:
        pure = PurePosixPath(name)
        if pure.suffix in COMPRESSION_SUFFIXES:
            pure = pure.with_suffix("")
        if pure.suffix in FORMATS_BY_SUFFIX:
            return FORMATS_BY_SUFFIX[pure.suffix]
    return None
