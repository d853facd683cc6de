"""What a cascade keeps of one epoch, beside the work of its output: its rows, sampled rows, answers and records.

Each part is complete or absent. A record is kept once: of two runs that put one under the same name, both read the one
that landed first, because Delta skips the other's commit.
"""

from typing import TYPE_CHECKING

from pipemax_spark.storage.hadoop import HadoopFiles
from pipemax_spark.storage.tables import DeltaTable, Transaction

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_ROWS, _RECORDS, _CLOSED = "rows", "records", "closed"
_SCHEMA = "name string, text string"


class CascadeStore:
    """The parts and records of one epoch, in a directory of its own."""

    def __init__(self, spark: "SparkSession", directory: str) -> None:
        self._spark = spark
        self._files = HadoopFiles(spark)
        self._directory = directory

    @classmethod
    def open(cls, spark: "SparkSession", root: str) -> "CascadeStore | None":
        """Return the epoch under ``root`` that has begun and has not been closed; None if there is none."""
        latest = cls._latest(spark, root)
        return None if latest is None or latest.is_closed else latest

    @classmethod
    def begin(cls, spark: "SparkSession", root: str, rows: "DataFrame") -> "CascadeStore | None":
        """Begin the next epoch with these rows; None if there are none."""
        store = cls(spark, f"{root}/{cls._count(spark, root) + 1}")
        store.write(_ROWS, rows)
        return None if store.rows().isEmpty() else store

    @classmethod
    def _latest(cls, spark: "SparkSession", root: str) -> "CascadeStore | None":
        count = cls._count(spark, root)
        return None if count == 0 else cls(spark, f"{root}/{count}")

    @classmethod
    def _count(cls, spark: "SparkSession", root: str) -> int:
        """Return how many epochs have begun; one without rows has not."""
        number = 0
        while (store := cls(spark, f"{root}/{number + 1}")).exists(_ROWS) and not store.rows().isEmpty():
            number += 1
        return number

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
        return self._files.exists(f"{self.path(name)}/_delta_log")

    def write(self, name: str, rows: "DataFrame") -> None:
        """Write a part, as a table, in one commit."""
        rows.write.format("delta").mode("overwrite").option("overwriteSchema", "true").save(self.path(name))

    def read(self, name: str) -> "DataFrame":
        return self._spark.read.format("delta").load(self.path(name))

    def record(self, name: str) -> str | None:
        """Return the text of a record; None before it is put."""
        if not self.exists(_RECORDS):
            return None
        records = self.read(_RECORDS).where(f"name = '{name}'").collect()
        return records[0]["text"] if records else None

    def put(self, name: str, text: str) -> str:
        """Keep a record, unless there is one of this name. Return the one that is kept."""
        table = DeltaTable(self._spark, self.path(_RECORDS))
        row = self._spark.createDataFrame([(name, text)], _SCHEMA)
        if not table.exists():
            table.create(row.schema)
        table.append(
            row, Transaction(app_id=f"pipemax-cascade-{name}", version=1, note=f"pipemax cascade {name}")
        )
        kept = self.record(name)
        assert kept is not None, name
        return kept
