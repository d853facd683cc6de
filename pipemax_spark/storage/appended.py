"""Tell which files were appended to a Delta table between two of its versions, by the table's log.

A commit whose files hold the rows of the files that it removes, as ``OPTIMIZE`` writes it, says so in the log
(``dataChange``), and changes nothing here. Any other removal of rows is no append.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipemax_spark.storage.hadoop import LITERAL_PATH
from pipemax_spark.storage.tables import DeltaTable

if TYPE_CHECKING:
    from pyspark.sql import Column, SparkSession

_MAX_COMMITS = 1_000
_MAX_ACTIONS = 20_000
"""Lines of the log, each of which has a file at most, that the driver reads."""
_ACTIONS = (
    "add struct<path: string, dataChange: boolean, stats: string>, "
    "remove struct<path: string, dataChange: boolean>, metaData struct<configuration: map<string, string>>"
)
_COLUMN_MAPPING = "delta.columnMapping.mode"


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """What a line of the log says of a file, or of the table's columns."""

    version: int
    added: str | None = None
    """The name of a file that the commit adds."""
    rows: int | None = None
    """Its rows; None if the writer did not count them."""
    removed: str | None = None
    """The name of a file that the commit removes."""
    keeps_rows: bool = False
    """Whether the commit only moves rows from file to file."""
    may_rename: bool = False
    """Whether a column may have another column's name since."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AppendedFiles:
    """Files that were appended, all of which this version of the table holds."""

    version: int
    names: frozenset[str]
    rows: int


def appended_files(
    spark: "SparkSession", table: DeltaTable, *, since: int, until: int
) -> list[AppendedFiles] | None:
    """Return the files that were appended after version ``since``, up to ``until``.

    Return None if rows may have been changed or removed, or the log does not tell.
    """
    if not 0 <= until - since <= _MAX_COMMITS:
        return None
    if until == since:
        return []
    actions = _actions(spark, table, range(since + 1, until + 1))
    return None if actions is None else appended_by(actions, until=until)


def appended_by(actions: Iterable[Action], *, until: int) -> list[AppendedFiles] | None:
    """Return the files that these actions, in the order of their versions, append; see ``appended_files``."""
    appended: list[AppendedFiles] = []
    names: dict[str, int] = {}
    last = until

    def close() -> None:
        if names:
            appended.append(AppendedFiles(version=last, names=frozenset(names), rows=sum(names.values())))
            names.clear()

    # Files that are joined with others are read in the version before.
    for action in sorted(actions, key=lambda action: (action.version, action.removed is None)):
        if action.may_rename:
            return None
        if action.removed is not None:
            if not action.keeps_rows:
                return None
            if action.removed in names:
                last = action.version - 1
                close()
        elif action.added is not None and not action.keeps_rows:
            if action.rows is None or action.added in names:
                return None
            names[action.added] = action.rows
    last = until
    close()
    return appended


def _actions(spark: "SparkSession", table: DeltaTable, versions: Sequence[int]) -> list[Action] | None:
    """Return what the log says in these versions; None if it lacks one of them, or says too much."""
    from pyspark.errors import AnalysisException
    from pyspark.sql import functions as F  # noqa: N812

    paths = [f"{table.location()}/_delta_log/{version:020}.json" for version in versions]
    try:
        # A line that is no JSON must not pass for one without a removal.
        lines = spark.read.schema(_ACTIONS).options(mode="FAILFAST", **LITERAL_PATH).json(paths)
    except AnalysisException:  # a file is gone
        return None
    actions = lines.select(
        F.substring("_metadata.file_name", 1, 20).cast("long").alias("version"),
        _name("add").alias("added"),
        F.get_json_object("add.stats", "$.numRecords").cast("long").alias("rows"),
        _name("remove").alias("removed"),
        F.coalesce("add.dataChange", "remove.dataChange", F.lit(True)).alias("changes"),
        F.coalesce(F.col("metaData.configuration")[_COLUMN_MAPPING], F.lit("none")).alias("mapping"),
    )
    rows = actions.limit(_MAX_ACTIONS).collect()
    if len(rows) == _MAX_ACTIONS or {row["version"] for row in rows} != set(versions):
        return None
    return [
        Action(
            version=row["version"],
            added=row["added"],
            rows=row["rows"],
            removed=row["removed"],
            keeps_rows=not row["changes"],
            may_rename=row["mapping"] != "none",
        )
        for row in rows
    ]


def _name(action: str) -> "Column":
    """Return a column with the name, without directories, of the file that the action is about."""
    from pyspark.sql import functions as F  # noqa: N812

    return F.element_at(F.split(f"{action}.path", "/"), -1)
