"""Read the changes of a Delta table from its change data feed (``delta.enableChangeDataFeed``)."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipemax_spark.rows.following import RawChanges
from pipemax_spark.rows.incremental import is_unreadable
from pipemax_spark.rows.position import Position, check_same_table
from pipemax_spark.storage.tables import DeltaTable

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

FEED = "delta.enableChangeDataFeed"


@dataclass(frozen=True, slots=True)
class DeltaChanges:
    """See ``following.ChangingInput``."""

    table: DeltaTable
    version: int

    def mark(self) -> str | None:
        """See ``ChangingInput``."""
        return self.table.commit_mark(self.version)

    def whole(self) -> "DataFrame":
        """See ``ChangingInput``."""
        return self.table.read(version=self.version)

    def check_same(self, position: Position) -> None:
        """See ``ChangingInput``."""
        check_same_table(self.table, position, self.version)

    def changes(self, since: int) -> RawChanges:
        """See ``ChangingInput``."""
        options = {
            "readChangeFeed": "true",
            "startingVersion": str(since + 1),
            "endingVersion": str(self.version),
        }
        is_there = "_change_type IN ('insert', 'update_postimage')"
        rows = self.table.read(options=options)
        return RawChanges(rows, order="_commit_version", is_there=is_there, only_added=False)

    def is_unreadable(self, error: Exception) -> bool:
        """See ``ChangingInput``."""
        return is_unreadable(str(error))


def has_feed(table: DeltaTable) -> bool:
    """Tell whether the table, which exists, keeps a feed of its changes now."""
    return table.properties().get(FEED, "").lower() == "true"
