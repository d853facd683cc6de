"""What a cascade keeps next to the work of its output: of each epoch its rows, sampled rows, answers and records.

These are Delta tables in the work directory, also for an output in another format: every session of a job has Delta.
Each part is complete or absent, because it is one commit. Parts and records are kept once: of two runs that write one
under the same name, both read the one that landed first, because Delta skips the other's commit, or refuses it.
"""

import contextlib
import json
from typing import TYPE_CHECKING

from pipemax_spark.errors import CommitRefusedError
from pipemax_spark.storage.hadoop import HadoopFiles
from pipemax_spark.storage.tables import DeltaTable, Transaction

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_ROWS, _RECORDS, _CLOSED = "rows", "records", "closed"
_SCHEMA = "name string, text string"


class Records:
    """Texts by name, each of which is put once, in a directory."""

    def __init__(self, spark: "SparkSession", path: str) -> None:
        self._spark = spark
        self._table = DeltaTable(spark, path)

    def all(self) -> dict[str, str]:
        """Return each record's text by its name."""
        if not self._table.exists():
            return {}
        return {row["name"]: row["text"] for row in self._table.read().collect()}

    def get(self, name: str) -> str | None:
        """Return the text of a record; None before it is put."""
        return self.all().get(name)

    def put(self, name: str, text: str) -> str:
        """Keep a record, unless there is one of this name. Return the one that is kept."""
        row = self._spark.createDataFrame([(name, text)], _SCHEMA)
        transaction = Transaction(app_id=f"pipemax-cascade-{name}", version=1, note=f"pipemax cascade {name}")
        with contextlib.suppress(CommitRefusedError):  # another run has put it at this moment
            self._table.append(row, transaction)
        kept = self.get(name)
        assert kept is not None, name
        return kept


class CascadeStore:
    """The parts and records of one epoch, in a directory of its own."""

    def __init__(self, spark: "SparkSession", root: str, number: int) -> None:
        """Name the epoch, counted from 1, whose directory is under ``root``."""
        self._spark = spark
        self._files = HadoopFiles(spark)
        self._directory = f"{root}/{number}"
        self._records = Records(spark, self.path(_RECORDS))
        self.number = number

    @property
    def is_closed(self) -> bool:
        """Whether all of its rows are in the output."""
        return self._files.exists(self.path(_CLOSED))

    def close(self) -> None:
        self._files.write_text(self.path(_CLOSED), "")

    def path(self, name: str) -> str:
        return f"{self._directory}/{name}"

    def rows(self) -> "DataFrame":
        """Return the rows of the epoch."""
        return self.read(_ROWS)

    def exists(self, name: str) -> bool:
        """Tell whether a part is complete."""
        return self._table(name).exists()

    def write(self, name: str, rows: "DataFrame") -> None:
        """Write a part, as a table, in one commit, unless another run has written it meanwhile."""
        table = self._table(name)
        commits = table.version() + 1 if table.exists() else 0
        # With this pair of options, Delta skips a commit that another one with the same pair has forestalled.
        once = {"txnAppId": f"pipemax-cascade-{name}", "txnVersion": str(commits)}
        writer = rows.write.format("delta").mode("overwrite").options(overwriteSchema="true", **once)
        writer.save(self.path(name))

    def read(self, name: str) -> "DataFrame":
        return self._table(name).read()

    def record(self, name: str) -> str | None:
        """Return the text of a record; None before it is put."""
        return self._records.get(name)

    def put(self, name: str, text: str) -> str:
        """Keep a record, unless there is one of this name. Return the one that is kept."""
        return self._records.put(name, text)

    def _table(self, name: str) -> DeltaTable:
        return DeltaTable(self._spark, self.path(name))


class Epochs:
    """The epochs of one output under one spec, in the order in which they began, and where draws began again."""

    def __init__(self, spark: "SparkSession", root: str) -> None:
        self._spark = spark
        self._root = root
        self._files = HadoopFiles(spark)
        self._resets = Records(spark, f"{root}/resets")

    def open(self) -> CascadeStore | None:
        """Return the epoch that has begun and is not closed; None if there is none, or a reset has given it up."""
        count = self.count()
        if count == self.last_reset()[1]:
            return None
        latest = CascadeStore(self._spark, self._root, count)
        return None if latest.is_closed else latest

    def begin(self, rows: "DataFrame") -> CascadeStore | None:
        """Begin the next epoch with these rows; None if there are none."""
        store = CascadeStore(self._spark, self._root, self.count() + 1)
        store.write(_ROWS, rows)
        return None if store.rows().isEmpty() else store

    def before(self, store: CascadeStore) -> list[CascadeStore]:
        """Return the epochs before this one, the latest first, as far as the last reset."""
        first = self.last_reset()[1] + 1
        return [
            CascadeStore(self._spark, self._root, number) for number in range(store.number - 1, first - 1, -1)
        ]

    def count(self) -> int:
        """Return how many epochs have begun; one without rows has not."""
        entries = self._files.list(self._root)
        number = max((int(entry.name) for entry in entries if entry.name.isdecimal()), default=0)
        if number == 0:
            return 0
        store = CascadeStore(self._spark, self._root, number)
        return number if store.exists(_ROWS) and not store.rows().isEmpty() else number - 1

    def last_reset(self) -> tuple[int, int]:
        """Return the number of the draws that began last, and how many epochs had begun before: 1 and 0 at first."""
        resets = self._resets.all()
        number = max(map(int, resets), default=1)
        return number, json.loads(resets[str(number)])["after_epoch"] if resets else 0

    def reset(self, *, known_number: int = 1) -> int:
        """Give up the open epoch and the ledger so far. Return the number of the draws that begin.

        ``known_number`` is the highest number that is known from elsewhere.
        """
        number = max(self.last_reset()[0], known_number) + 1
        self._resets.put(str(number), json.dumps({"after_epoch": self.count()}))
        return number
