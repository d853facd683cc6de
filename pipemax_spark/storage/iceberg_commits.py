"""Commit to an Iceberg table through Iceberg's Java API: files that are already written, fenced by a number.

A commit is one Iceberg transaction: a snapshot with the files, and a table property that holds the transaction's number
(``Transaction.version``) under its application id. Iceberg prepares the snapshot for a certain state of the table, runs
our validator on exactly that state, and then replaces that state with a compare-and-set in the catalog; if another
commit landed meanwhile, it does all of this again. The validator refuses the snapshot unless the number is above the
table's, so a commit that another run has fenced off, or that has landed before, can never land. The numbers are table
properties rather than properties of snapshots, because ``expire_snapshots`` removes snapshots.

A commit always adds a snapshot to the main branch, even an empty one: a REST catalog compares only the branch.
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from pipemax_spark.errors import CommitRefusedError, cause_of
from pipemax_spark.storage.tables import Transaction, retried

if TYPE_CHECKING:
    from py4j.java_gateway import JavaObject
    from pyspark.sql import SparkSession

NUMBER_PROPERTY = "pipemax.transaction."
"""Table property: the highest number that was committed under the application id after this prefix."""
NOTE, APPLICATION, NUMBER, ROWS = "pipemax.commit", "pipemax.application", "pipemax.number", "pipemax.rows"
"""Properties of our snapshots: the transaction's three facts and the rows that it adds."""

_VALIDATOR = "org.apache.iceberg.SnapshotAncestryValidator"
RETRY_PAUSE_S = 1.0
"""Before a commit is repeated that other writers have outrun, after Iceberg's own retries."""


class CommitValidator:
    """Iceberg's validator of one commit, called back from the JVM for each state that the commit may replace."""

    def __init__(self, table: "JavaObject", transaction: Transaction) -> None:
        """Validate commits to ``table``, the table as the Iceberg transaction sees it."""
        self._table = table
        self._transaction = transaction
        self.refused_by: int | None = None
        """The number in the table that refused the commit, if one did."""

    def validate(self, _ancestors: "JavaObject") -> bool:
        """Tell Iceberg whether the commit may follow the table's present state."""
        known = last_number(self._table, self._transaction.app_id)
        self.refused_by = known if known is not None and known >= self._transaction.version else None
        return self.refused_by is None

    def errorMessage(self) -> str:  # noqa: N802 - Iceberg's name
        """Say why the commit was refused."""
        return (
            f"number {self._transaction.version} of {self._transaction.app_id} is not above {self.refused_by}"
        )

    class Java:
        """The interface that py4j implements with this class."""

        implements = (_VALIDATOR,)


def can_fence(spark: "SparkSession") -> bool:
    """Tell whether the session's Iceberg release lets a commit be validated."""
    jvm: Any = spark._jvm
    return bool(jvm.org.apache.spark.util.Utils.classIsLoadable(_VALIDATOR))


def last_number(table: "JavaObject", app_id: str) -> int | None:
    """Return the highest number that was committed to the table under this application id."""
    known = table.properties().get(NUMBER_PROPERTY + app_id)
    return None if known is None else int(known)


def commit_fenced(
    load: Callable[[], "JavaObject"],
    transaction: Transaction,
    *,
    begin: Callable[["JavaObject"], "JavaObject"],
    summary: Mapping[str, str],
    pause_s: float = RETRY_PAUSE_S,
) -> None:
    """Commit a change of files as a snapshot with the transaction's facts and this ``summary``.

    ``load`` returns the table, not shared with anybody: Iceberg's transactions lose commits if other threads refresh
    their table. ``begin`` returns the pending change of an Iceberg transaction. The JVM must be able to call back.
    Raise ``CommitRefusedError`` if the transaction's number is not above the table's.
    """
    properties = {
        NOTE: transaction.note,
        APPLICATION: transaction.app_id,
        NUMBER: str(transaction.version),
        **summary,
    }

    def commit() -> None:
        pending = load().newTransaction()
        change = begin(pending)
        for name, value in properties.items():
            change.set(name, value)
        fence = CommitValidator(pending.table(), transaction)
        try:
            change.validateWith(fence)
            change.commit()
            number = pending.updateProperties()
            number.set(NUMBER_PROPERTY + transaction.app_id, str(transaction.version)).commit()
            pending.commitTransaction()
        except Exception as error:
            if fence.refused_by is not None:
                raise CommitRefusedError(f"{transaction.note}: {cause_of(error)}") from error
            raise

    retried(commit, transaction.note, is_lost_race, pause_s=pause_s)


def is_lost_race(error: BaseException) -> bool:
    """Tell whether Iceberg gave a commit up because others kept landing first; nothing was committed then."""
    return "CommitFailedException" in str(error)


def is_conflict(error: BaseException) -> bool:
    """Tell whether a change of files was refused because another writer changed the same files meanwhile."""
    return "ValidationException" in str(error)
