"""Check the ids of the whole input, and remember which version had unique ids, so that it is not checked again.

A run notes in its claim of the output which version of which input it has checked. While the input is at that version,
a later run checks nothing. If rows were only appended since, it looks for the ids of these rows among all ids: each
must be there once, and no other id is shuffled. In every other case it compares all ids, which is always right.
"""

import hashlib
import json
import logging
import re
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING

from pipemax_spark.errors import cause_of
from pipemax_spark.options import JobOptions
from pipemax_spark.rows.id_columns import FEW_ROWS, check_ids
from pipemax_spark.rows.incremental import is_unreadable
from pipemax_spark.rows.written_rows import condition_of
from pipemax_spark.spark.helper_columns import free_name
from pipemax_spark.spark.session import is_connect
from pipemax_spark.spark.sql import quoted
from pipemax_spark.storage.appended import AppendedFiles, appended_files
from pipemax_spark.storage.fence import remarks
from pipemax_spark.storage.output_table import OutputTable, open_table
from pipemax_spark.storage.sources import Source
from pipemax_spark.storage.tables import DeltaTable

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

log = logging.getLogger(__name__)

_FORMAT = 1
"""The format of the note and what the check finds: a run believes no note of another format."""
_NOTE = re.compile(r"ids ([0-9a-f]+) were unique in version (\d+) ([0-9a-f]+)")
_FILE = "__pipemax_file"


@dataclass(frozen=True, slots=True, kw_only=True)
class UniqueIds:
    """The fact that the ids of an input are unique, which a claim notes."""

    key: str
    """Stands for the input, the ids and the condition, whatever the version is."""
    version: int
    mark: str
    """Distinguishes this version's commit from any other: an older copy of the table counts its versions again."""

    @classmethod
    def of(cls, source: Source, options: JobOptions, id_columns: tuple[str, ...]) -> "UniqueIds | None":
        """Return what a check of this input finds out; None if no later run could be sure that it holds."""
        if source.version is None or is_connect(source.rows.sparkSession):  # a client cannot read the log
            return None
        condition = None
        if options.where is not None and (condition := condition_of(source.rows)) is None:
            return None
        mark = _mark(source, source.version)
        if mark is None:
            return None
        decides = {
            "format": _FORMAT,
            "input": source.table_id,
            "input_options": dict(options.input_option),
            "where": [options.where, condition],
            "ids": [(name, source.rows.schema[name].dataType.simpleString()) for name in id_columns],
        }
        key = hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()[:32]
        return cls(key=key, version=source.version, mark=mark)

    @property
    def note(self) -> str:
        return f"ids {self.key} were unique in version {self.version} {self.mark}"

    def noted(self, table: OutputTable) -> "UniqueIds | None":
        """Return what the latest claim of the output that is about the same ids had noted, or None."""
        if not table.exists():
            return None
        for remark in remarks(table):
            match = _NOTE.fullmatch(remark)
            if match is not None and match[1] == self.key:
                return UniqueIds(key=self.key, version=int(match[2]), mark=match[3])
        return None


def check_input_ids(
    table: OutputTable, source: Source, options: JobOptions, id_columns: tuple[str, ...]
) -> str | None:
    """Raise ``JobError`` for ids of the input that are null or not unique.

    ``table`` is the output, which need not exist. Return the note for the run's claim, or None.
    """
    shows_values = not options.no_sample
    unique = UniqueIds.of(source, options, id_columns)
    earlier = None if unique is None else unique.noted(table)
    if unique is not None and earlier is not None:
        if earlier == unique:
            return unique.note
        appended = _appended(source, earlier)
        if appended is not None and _are_checked(source, appended, id_columns, shows_values=shows_values):
            return unique.note
    check_ids(source.rows, id_columns, shows_values=shows_values)
    return None if unique is None else unique.note


def _mark(source: Source, version: int) -> str | None:
    """Return a text that distinguishes this version of the input; None if nothing does."""
    from py4j.protocol import Py4JError

    table = open_table(source.rows.sparkSession, source.name)
    if not isinstance(table, DeltaTable):
        return "0"  # the id of an Iceberg table's snapshot, which is its version, says all
    try:
        return table.commit_mark(version)
    except (
        Py4JError
    ) as error:  # such as that of a catalog which gives access to its tables by their names only
        log.info("the log of %s cannot be read, so all ids are compared: %s", table.name, cause_of(error))
        return None


def _appended(source: Source, earlier: UniqueIds) -> list[AppendedFiles] | None:
    """Return the files that were appended since; None if that is not all that happened, or there are many rows."""
    table = open_table(source.rows.sparkSession, source.name)
    if not isinstance(table, DeltaTable) or _mark(source, earlier.version) != earlier.mark:
        return None
    assert source.version is not None, source
    files = appended_files(source.rows.sparkSession, table, since=earlier.version, until=source.version)
    if files is None or sum(some.rows for some in files) > FEW_ROWS:
        return None
    return files


def _are_checked(
    source: Source, appended: list[AppendedFiles], id_columns: tuple[str, ...], *, shows_values: bool
) -> bool:
    """Raise ``JobError`` if an id of the appended files is null, or in the input twice.

    Return False if these files can no longer be read.
    """
    from pyspark.sql import functions as F  # noqa: N812

    if not appended:
        return True
    table = DeltaTable(source.rows.sparkSession, source.name)
    ids = reduce(
        lambda some, more: some.unionAll(more), (_ids_in(table, files, id_columns) for files in appended)
    ).persist()  # few rows, which all rows of the table are read for
    try:
        try:
            # As many as the log says, so the files are those that it means.
            if ids.count() != sum(files.rows for files in appended):
                return False
        except Exception as error:
            if is_unreadable(str(error)):
                return False
            raise
        names = [free_name(f"{_FILE}_{place}", source.rows.columns) for place in range(len(id_columns))]
        sent = F.broadcast(ids.toDF(*names))
        # Null ids are found, too: a null is equal to another one here.
        same = reduce(
            lambda some, more: some & more,
            (
                source.rows[quoted(ours)].eqNullSafe(sent[theirs])
                for ours, theirs in zip(id_columns, names, strict=True)
            ),
        )
        check_ids(source.rows.join(sent, same, "left_semi"), id_columns, shows_values=shows_values)
    finally:
        ids.unpersist()
    return True


def _ids_in(table: DeltaTable, files: AppendedFiles, id_columns: tuple[str, ...]) -> "DataFrame":
    """Return the ids in these files, and in files of the same names, if there are any."""
    rows = table.read(version=files.version)
    name = rows.metadataColumn("_metadata").getField("file_name")
    return rows.where(name.isin(*files.names)).select(*map(quoted, id_columns))
