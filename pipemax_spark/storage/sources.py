"""Open the rows to annotate: a Delta or Iceberg table, pinned to one version, or Parquet, CSV or JSON files."""

import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from pipemax_spark.errors import JobError, cause_of
from pipemax_spark.spark.session import is_connect
from pipemax_spark.storage import openai_batch
from pipemax_spark.storage.bad_lines import BadLines, unless_unreadable
from pipemax_spark.storage.executor_files import Files, files_of
from pipemax_spark.storage.hadoop import options_for_files
from pipemax_spark.storage.iceberg import IcebergTable
from pipemax_spark.storage.names import COMPRESSION_SUFFIXES, FORMATS_BY_SUFFIX, exists, is_path, provider_of
from pipemax_spark.storage.output_table import open_table
from pipemax_spark.storage.tables import DeltaTable
from pipemax_spark.storage.text_files import TEXT_FORMATS, TextFiles, open_text_files

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

log = logging.getLogger(__name__)

_TIME_TRAVEL = ("versionasof", "timestampasof")
_CHANGE_FEED = ("readchangefeed", "readchangedata")
"""Delta's read options that choose a version, and those that read changes in place of rows, in lower case."""
FORMATS = ("delta", "parquet", "csv", "json", openai_batch.FORMAT)


_DELTA_ONLY = "the job reads nothing else; write the rows to one, as in df.write.saveAsTable(…)"


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
    """Whether ``--incremental`` can follow it: a Delta or Iceberg table."""
    is_iceberg: bool = False
    text: TextFiles | None = None
    """JSON or CSV files, of which lines may be no rows."""
    is_blank: bool = False
    """Whether the files have neither rows nor columns; ``rows`` then stand in for them."""


def read_source(
    spark: "SparkSession",
    name: str,
    *,
    file_format: str | None = None,
    options: Mapping[str, str] | None = None,
    bad_lines: BadLines = BadLines.FAIL,
    warn: Callable[[str], None] = log.warning,
) -> Source:
    """Return the source. Raise ``JobError`` if there is no such table or file, or it cannot be read.

    ``bad_lines`` says what becomes of lines of batch files; those of other text files are found with ``Source.text``.
    """
    from pyspark.errors import AnalysisException, IllegalArgumentException

    if file_format is not None and file_format not in FORMATS:
        raise JobError(f"input-format is {file_format!r}; give one of {', '.join(FORMATS)}")
    try:
        if not is_path(name):
            return _read_table(spark, name, options or {})
        path = files_of(spark).qualified(name)
        if file_format == openai_batch.FORMAT:
            return _read_batch(spark, path, options or {}, bad_lines, warn)
        return _read_path(spark, path, file_format, options or {})
    except (AnalysisException, IllegalArgumentException) as error:
        cause = cause_of(error)
        if "Relative path in absolute URI" in cause:  # of Hadoop's patterns only: paths are literal
            cause = (
                "Hadoop's patterns do not get past a file with a colon in its name; name the directory, or rename "
                f"the file ({cause})"
            )
        raise JobError(f"input {name!r} cannot be read: {cause}") from error


def _read_table(spark: "SparkSession", name: str, options: Mapping[str, str]) -> Source:
    if not exists(spark, name):
        raise JobError(
            f"there is no table {name!r}; for files, give a path such as ./{name} or an absolute one"
        )
    table = open_table(spark, name)
    if is_connect(spark) and not table.exists():
        raise JobError(f"input {name!r} is not a Delta table, and over Spark Connect {_DELTA_ONLY}")
    if not table.exists():
        # A view, or a table of another format, is read in its current state.
        if options and not provider_of(spark, name):
            raise JobError(
                f"input option {next(iter(options))} is for a table or for files, and {name!r} is a view; leave it out"
            )
        return Source(rows=spark.read.options(**options).table(name), name=name, description=f"table {name}")
    if isinstance(table, IcebergTable):
        rows, snapshot_id = table.pinned(options)
        state = "no snapshot yet" if snapshot_id is None else f"snapshot {snapshot_id}"
        return Source(
            rows=rows,
            name=name,
            description=f"Iceberg {name}, {state}",
            version=snapshot_id,
            table_id=None if snapshot_id is None else table.table_id(),
            tells_appends=not table.is_pinned(options),
            is_iceberg=True,
        )
    return _pinned(table, options)


def _read_batch(
    spark: "SparkSession",
    path: str,
    options: Mapping[str, str],
    bad_lines: BadLines,
    warn: Callable[[str], None],
) -> Source:
    if "encoding" in map(str.lower, options):
        raise JobError(
            "--input-option encoding cannot be read with openai-batch: its files are UTF-8; convert them"
        )
    ours = options_for_files(path, is_pattern=_is_pattern(files_of(spark), path))
    requests = openai_batch.read_requests(
        spark, path, options={**ours, **options}, drops_bad_lines=bad_lines is BadLines.DROP
    )
    if requests.dropped is not None:
        warn(f"left out of {path}: {requests.dropped}")
    description = f"OpenAI's batch file {path}"
    return Source(rows=requests.rows, name=path, description=description, is_blank=requests.is_empty)


def _is_pattern(files: Files, path: str) -> bool:
    """Tell whether the path is a pattern such as /data/*.parquet. Raise ``JobError`` if nothing is there."""
    if files.exists(path):
        return False
    if re.search(r"[*?\[{]", path):
        return True
    raise JobError(f"input {path!r} does not exist; give a Delta table's path or name, or a file's path")


def _read_path(
    spark: "SparkSession", path: str, file_format: str | None, options: Mapping[str, str]
) -> Source:
    files = files_of(spark)
    table = DeltaTable(spark, path)
    if file_format in (None, "delta") and table.exists():
        return _pinned(table, options)
    is_pattern = _is_pattern(files, path)
    if is_connect(spark):
        raise JobError(f"input {path!r} holds no Delta table, and over Spark Connect {_DELTA_ONLY}")
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
    description = f"{chosen} {path}"
    if chosen in TEXT_FORMATS:
        text = unless_unreadable(
            path, lambda: open_text_files(spark, chosen, path, options, is_pattern=is_pattern)
        )
        return Source(rows=text.rows, name=path, description=description, text=text)
    ours = options_for_files(path, is_pattern=is_pattern)
    rows = spark.read.format(chosen).options(**ours, **options).load(path)
    return Source(rows=rows, name=path, description=description)


def _pinned(table: DeltaTable, options: Mapping[str, str]) -> Source:
    """Return the table's rows at its present version, or at the one that the read options name."""
    for name, value in options.items():
        if name.lower() in _CHANGE_FEED and value.lower() == "true":
            raise JobError(
                f"input option {name} reads a table's changes, and a job annotates rows: write the changes to a table "
                "and annotate that, or follow the table with --incremental"
            )
    chosen = {name: value for name, value in options.items() if name.lower() in _TIME_TRAVEL}
    if len(chosen) > 1:
        raise JobError(f"input options {' and '.join(chosen)} both choose a version; give one of them")
    version = table.version_named(chosen) if chosen else table.version()
    others = {name: value for name, value in options.items() if name not in chosen}
    rows = table.read(version=version, options=others)
    _ = rows.schema  # over Spark Connect nothing is looked at before
    return Source(
        rows=rows,
        name=table.name,
        description=f"Delta {table.name}, version {version}",
        version=version,
        table_id=table.table_id(),
        tells_appends=not chosen,
    )


def _format_of(files: Files, path: str) -> str | None:
    """Return the format by the path's ending, else by the endings of the files in it."""
    names = [path, *sorted(entry.name for entry in files.list(path) if not entry.name.startswith(("_", ".")))]
    for name in names:
        pure = PurePosixPath(name)
        if pure.suffix in COMPRESSION_SUFFIXES:
            pure = pure.with_suffix("")
        if pure.suffix in FORMATS_BY_SUFFIX:
            return FORMATS_BY_SUFFIX[pure.suffix]
    return None
