"""What is left to do, cut into chunks whose row sets are fixed before any of them runs.

A row is done when the output table holds its key under the job's spec: its id columns, or without ids the content of
the whole row, counted (a row that stands three times in the input is done when it stands three times in the output).
What is left is written once to the work directory, each row with a slice number; a chunk is a range of slices, noted
in the manifest before it starts.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pipemax_spark.annotate import ANNOTATION
from pipemax_spark.errors import JobError
from pipemax_spark.prompts import check_column, quoted
from pipemax_spark.tables import DeltaTarget

SLICES = 4096
"""The finest cut; a chunk is one slice at least."""
_SLICE = "__pipemax_slice"
_KEY, _OCCURRENCE = "__pipemax_key", "__pipemax_occurrence"
FIRST_CHUNK_ROWS = 2_000
"""Before the first rate is known."""


def check_ids(rows: Any, id_columns: Sequence[str]) -> None:
    """``JobError`` for unknown, null and doubled ids, with examples."""
    from pyspark.sql import functions as F  # noqa: N812

    for name in id_columns:
        check_column(name, rows.columns)
    names = [quoted(name) for name in id_columns]
    nulls = rows.where(" OR ".join(f"{name} IS NULL" for name in names)).limit(1).count()
    if nulls:
        raise JobError(
            f"id column(s) {', '.join(id_columns)} hold nulls; every row needs an id, or leave out id-columns"
        )
    doubled = rows.groupBy(*names).count().where(F.col("count") > 1).limit(3).collect()
    if doubled:
        examples = "; ".join(str({name: row[name] for name in id_columns}) for row in doubled)
        raise JobError(
            f"ids are not unique: {examples} stand more than once. Remove the doubles, name more id-columns, or leave "
            "id-columns out (rows are then told apart by their content, and counted)"
        )


def rows_left(rows: Any, done: Any | None, id_columns: Sequence[str]) -> Any:
    """The rows of the input that ``done`` (output rows under the job's spec, or None) does not hold yet."""
    if done is None:
        return rows
    if id_columns:
        return rows.join(done.select(*map(quoted, id_columns)), on=list(id_columns), how="left_anti")
    columns = rows.columns
    missing = [name for name in columns if name not in done.columns]
    if missing:
        # A row with another set of columns is another row.
        return rows
    finished = _counted(done.select(*map(quoted, columns)), columns).select(_KEY, _OCCURRENCE)
    left = _counted(rows, columns).join(finished, on=[_KEY, _OCCURRENCE], how="left_anti")
    return left.drop(_KEY, _OCCURRENCE)


def _counted(rows: Any, columns: Sequence[str]) -> Any:
    """With each row's content key, and its number among its equals."""
    from pyspark.sql import Window
    from pyspark.sql import functions as F  # noqa: N812

    # JSON keeps values apart that a plain concatenation would run together; timestamps to the microsecond.
    formats = {
        "timestampFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSSXXX",
        "timestampNTZFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSS",
    }
    content = F.to_json(F.struct(*(F.col(quoted(name)) for name in columns)), formats)
    window = Window.partitionBy(_KEY).orderBy(F.lit(1))
    return rows.withColumn(_KEY, F.sha2(content, 256)).withColumn(_OCCURRENCE, F.row_number().over(window))


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """The rows of slices [first_slice, end_slice)."""

    number: int
    first_slice: int
    end_slice: int


class WorkDirectory:
    """What is left, on storage that the driver and all executors see."""

    def __init__(self, spark: Any, path: str, *, run_id: str) -> None:
        self._spark = spark
        self._path = f"{path.rstrip('/')}/{run_id}"
        self._chunks: list[Chunk] = []
        self.rows = 0

    def write(self, rows: Any) -> int:
        """Fix the row sets: from here on the source is not read again. Returns the number of rows."""
        from pyspark.sql import functions as F  # noqa: N812

        sliced = rows.withColumn(_SLICE, (F.rand(seed=0) * SLICES).cast("int"))
        sliced.write.mode("overwrite").parquet(f"{self._path}/left")
        self.rows = self._read().count()
        return self.rows

    def read(self, chunk: Chunk, *, partitions: int) -> Any:
        """A chunk's rows, dealt out evenly: as many partitions as asked, which Spark does not merge again."""
        rows = self._read().where(f"{_SLICE} >= {chunk.first_slice} AND {_SLICE} < {chunk.end_slice}")
        return rows.drop(_SLICE).repartition(partitions)

    def next_chunk(self, rows_wanted: int) -> Chunk | None:
        """About so many rows, noted in the manifest before it is returned; None when all are handed out."""
        first = self._chunks[-1].end_slice if self._chunks else 0
        if first >= SLICES or self.rows == 0:
            return None
        slices = max(1, round(rows_wanted * SLICES / self.rows))
        end = min(SLICES, first + slices)
        # A last chunk of a few rows is not worth a commit.
        if SLICES - end < slices // 4:
            end = SLICES
        chunk = Chunk(number=len(self._chunks), first_slice=first, end_slice=end)
        self._chunks.append(chunk)
        self._write_manifest()
        return chunk

    def remove(self) -> None:
        hadoop_path, file_system = self._file_system(self._path)
        file_system.delete(hadoop_path, True)

    def _read(self) -> Any:
        return self._spark.read.parquet(f"{self._path}/left")

    def _write_manifest(self) -> None:
        path, file_system = self._file_system(f"{self._path}/manifest.json")
        stream = file_system.create(path, True)
        stream.write(
            bytearray(json.dumps({"rows": self.rows, "chunks": [asdict(c) for c in self._chunks]}).encode())
        )
        stream.close()

    def _file_system(self, path: str) -> tuple[Any, Any]:
        hadoop_path = self._spark._jvm.org.apache.hadoop.fs.Path(path)
        return hadoop_path, hadoop_path.getFileSystem(self._spark._jsc.hadoopConfiguration())


def default_work_directory(spark: Any, output: DeltaTarget) -> str:
    """``_pipemax`` in the output's directory, which readers and VACUUM pass over."""
    return f"{output.location(spark).rstrip('/')}/_pipemax"


def done_rows(spark: Any, output: DeltaTarget, spec_hash: str) -> Any | None:
    """What the output holds under the spec."""
    if not output.exists(spark):
        return None
    return output.read(spark).where(f"{ANNOTATION}.spec_hash = '{spec_hash}'")
