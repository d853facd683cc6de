"""Read the changes of an Iceberg table: appended rows by its incremental scan, others by its changelog.

A position is a snapshot's id. The changelog compares files, so it costs as much as the files that were rewritten, and
it does not know tables whose rows are deleted by merge-on-read: their changes cannot be read.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipemax_spark.errors import cause_of
from pipemax_spark.rows.following import RawChanges
from pipemax_spark.rows.incremental import is_gone
from pipemax_spark.rows.position import Position
from pipemax_spark.storage.iceberg import IcebergTable
from pipemax_spark.storage.iceberg_catalog import IcebergCatalog

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_ADDS_ONLY = frozenset({"append", "replace"})
"""Operations of snapshots that change and delete no row; the second is a compaction."""
_UNREADABLE = (
    "not a parent ancestor",
    "Delete files are currently not supported",
    "Cannot compute updates",
    "Cannot find snapshot",
    "NotFoundException",
)
"""What Iceberg says of changes that it cannot tell."""


class _NotAnAncestorError(ValueError):
    """The position's snapshot is not before the present one: it has expired, or the table was rolled back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IcebergChanges:
    """See ``following.ChangingInput``; a version is a snapshot's id."""

    table: IcebergTable
    catalog: IcebergCatalog
    version: int
    id_columns: Sequence[str]
    options: Mapping[str, str]
    """Of Spark's reader."""

    def mark(self) -> str | None:
        """Return None: the id distinguishes the snapshot."""
        return None

    def whole(self) -> "DataFrame":
        """See ``ChangingInput``."""
        return self.table.read(options={**self.options, "versionAsOf": str(self.version)})

    def check_same(self, position: Position) -> None:
        """Do nothing: a snapshot that is not an ancestor of the present one shows when changes are read."""

    def changes(self, since: int) -> RawChanges:
        """See ``ChangingInput``."""
        operations = self.catalog.operations_between(since, self.version)
        if operations is None:
            raise _NotAnAncestorError(f"snapshot {since} is no longer among those before {self.version}")
        pins = {"start-snapshot-id": str(since), "end-snapshot-id": str(self.version)}
        if set(operations) <= _ADDS_ONLY or not self.id_columns:
            return RawChanges(
                self.table.read(options={**self.options, **pins}),
                order="0",
                is_there="true",
                only_added=set(operations) <= _ADDS_ONLY,
            )
        is_there = "_change_type IN ('INSERT', 'UPDATE_AFTER')"
        rows = self.catalog.changelog(pins, self.id_columns)
        return RawChanges(rows, order="_change_ordinal", is_there=is_there, only_added=False)

    def is_unreadable(self, error: Exception) -> bool:
        """See ``ChangingInput``."""
        text = f"{error} {cause_of(error)}"
        return (
            isinstance(error, _NotAnAncestorError) or is_gone(text) or any(one in text for one in _UNREADABLE)
        )
