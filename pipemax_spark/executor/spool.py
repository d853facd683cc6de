"""Keep completions that no commit holds yet, so that a retried task does not ask the engine for them again.

While a task runs, it closes a small Parquet file of completions every 10 s, in its partition's directory below its
chunk's, on storage that all executors see. A later attempt at the same partition lists that directory and reads them
back; a later run commits them. Files are never renamed, because object stores cannot: a file that was not closed lacks
Parquet's footer, and readers skip it. A row is known by its key, which stands for its prompt and its overrides. The
spool is a cache: losing it costs work, never rows, and a completion that is in it twice is used once.
"""

import logging
import re
import threading
import time
import uuid
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Self

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyarrow import fs

from pipemax.wire import COMPLETION_SCHEMA

log = logging.getLogger(__name__)

KEY = "key"
PERIOD_S = 10.0
MOST_READ_BYTES = 256 << 20
"""Maximum memory for one partition's completions; rows beyond it are computed again."""
SPOOL_SCHEMA = COMPLETION_SCHEMA.insert(0, pa.field(KEY, pa.string()))
_ROW_ID = SPOOL_SCHEMA.get_field_index("row_id")
_DEALT = re.compile(r"of-(\d+)")
_STORAGE_ERRORS = (OSError, pa.ArrowException)


class Spool:
    """One task's spool: reads what earlier attempts left, and from entry to exit writes what this attempt completes.

    ``recall`` and ``keep`` may be called from two threads. Without a directory, the spool knows and keeps nothing. If
    the storage fails, the task warns and goes on without a spool.
    """

    def __init__(
        self,
        directory: str | None,
        *,
        partition: int,
        beats: str | None = None,
        period_s: float = PERIOD_S,
        most_read_bytes: int = MOST_READ_BYTES,
    ) -> None:
        """Prepare the spool of a partition, which also writes the file ``beats``, and ends once that is gone."""
        self._beats = beats
        self._most_read_bytes = most_read_bytes
        self._directory = None if directory is None else f"{directory}/part-{partition:05}"
        self._attempt = uuid.uuid4().hex
        self._period_s = period_s
        self._known = _Completions([])
        self._lock = threading.Lock()
        self._kept: list[pa.RecordBatch] = []
        self._files_written = 0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._write_often, name="pipemax-spool", daemon=True)

    def __enter__(self) -> Self:
        if self._directory is not None:
            self._known = _Completions(list(_read(self._directory, self._most_read_bytes)))
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._directory is not None:
            self._stopped.set()
            self._thread.join()

    def recall(self, keys: Sequence[str], row_ids: pa.Array) -> pa.RecordBatch:
        """Return completions (COMPLETION_SCHEMA) of those of these rows that are already complete.

        Each completion is recalled once.
        """
        return self._known.take(keys, row_ids)

    def keep(self, keys: pa.Array, completions: pa.RecordBatch) -> None:
        """Write the successful completions (COMPLETION_SCHEMA) soon.

        Error rows are not kept, because they are retried.
        """
        if self._directory is None:
            return
        batch = pa.RecordBatch.from_arrays([keys, *completions.columns], schema=SPOOL_SCHEMA)
        batch = batch.filter(pc.is_null(completions.column("error_code")))
        with self._lock:
            self._kept.append(batch)

    def _write_often(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._stopped.wait(self._period_s)
            try:
                if self._beats is not None and not _write_again(self._beats):
                    log.warning("completions are no longer spooled: %s is gone with its run", self._beats)
                    return
                self._write()
            except _STORAGE_ERRORS as error:
                log.warning(
                    "completions are no longer spooled, because %s cannot be written: %s",
                    self._directory,
                    error,
                )
                return

    def _write(self) -> None:
        with self._lock:
            kept, self._kept = self._kept, []
        table = pa.Table.from_batches(kept, SPOOL_SCHEMA)
        if not table.num_rows:
            return
        storage, directory = _open(self._directory or "")
        storage.create_dir(directory)
        name = f"{self._attempt}-{self._files_written}.parquet"
        self._files_written += 1
        pq.write_table(table, f"{directory}/{name}", filesystem=storage)


class _Completions:
    """Completions by key, each to be used once."""

    def __init__(self, tables: list[pa.Table]) -> None:
        self._table = pa.concat_tables([SPOOL_SCHEMA.empty_table(), *tables]).combine_chunks()
        self._places: defaultdict[str, list[int]] = defaultdict(list)
        for place, key in enumerate(self._table.column(KEY).to_pylist()):
            self._places[key].append(place)

    def take(self, keys: Sequence[str], row_ids: pa.Array) -> pa.RecordBatch:
        rows, places = [], []
        for i, key in enumerate(keys):
            if known := self._places.get(key):
                rows.append(i)
                places.append(known.pop())
        completions = self._table.take(pa.array(places, pa.int64()))
        completions = completions.set_column(
            _ROW_ID, COMPLETION_SCHEMA.field("row_id"), row_ids.take(pa.array(rows, pa.int64()))
        )
        columns = [column.combine_chunks() for column in completions.drop_columns([KEY]).columns]
        return pa.RecordBatch.from_arrays(columns, schema=COMPLETION_SCHEMA)


def _read(directory: str, most_bytes: int) -> Iterator[pa.Table]:
    """Yield the files of one partition, up to ``most_bytes`` in memory; skip a file that cannot be read."""
    num_bytes = 0
    try:
        storage, path = _open(directory)
        files = storage.get_file_info(fs.FileSelector(path, allow_not_found=True))
    except _STORAGE_ERRORS as error:
        log.warning("the spool in %s cannot be listed: %s", directory, error)
        return
    for file in files:
        try:
            table = pq.read_table(file.path, schema=SPOOL_SCHEMA, filesystem=storage)
        except _STORAGE_ERRORS as error:
            log.warning("%s is skipped, and its rows are annotated again: %s", file.path, error)
            continue
        num_bytes += table.nbytes
        if num_bytes > most_bytes:
            log.warning("%s and what follows is skipped: at most %d MB are read", file.path, most_bytes >> 20)
            return
        yield table


def dealt_directory(root: str, partitions: int) -> tuple[str, int]:
    """Return (directory, number of partitions) for rows that are assigned to partitions by their key.

    Both are the same as at the first call with this root, so that a later call assigns a row to the partition whose
    files hold it.
    """
    storage, path = _open(root)
    names = [entry.base_name for entry in storage.get_file_info(fs.FileSelector(path, allow_not_found=True))]
    known = [int(match[1]) for name in names if (match := _DEALT.fullmatch(name))]
    chosen = min(known, default=partitions)
    storage.create_dir(f"{path}/of-{chosen}")
    return f"{root}/of-{chosen}", chosen


def spool_fault(directory: str) -> str | None:
    """Return why tasks could not spool there, as far as this process can tell; None if they can."""
    probe = f"_probe-{uuid.uuid4().hex}"  # must not be the name of a file of the user
    try:
        storage, path = _open(directory)
        storage.create_dir(path)
        with storage.open_output_stream(f"{path}/{probe}") as stream:
            stream.write(b"x")
        storage.delete_file(f"{path}/{probe}")
    except _STORAGE_ERRORS as error:
        return str(error).partition("\n")[0]
    return None


def _write_again(path: str) -> bool:
    """Write the file if it is there; return whether it is."""
    storage, opened = _open(path)
    if storage.get_file_info(opened).type != fs.FileType.File:
        return False
    with storage.open_output_stream(opened) as stream:
        stream.write(str(time.time()).encode())
    return True


def _open(directory: str) -> tuple[fs.FileSystem, str]:
    """Open the directory with Arrow's own file systems, because tasks cannot use Hadoop's."""
    storage, path = fs.FileSystem.from_uri(arrow_location(directory))
    return storage, path


def arrow_location(directory: str) -> str:
    """Return the location under which Arrow opens a directory that is named as in Spark.

    On Databricks, Unity Catalog's volumes are mounted at ``/Volumes``, the rest of DBFS at ``/dbfs``.
    """
    location = re.sub(r"^s3[an]:", "s3:", directory)
    location = re.sub(r"^dbfs:/+(?=Volumes(/|$))", "/", location)
    return re.sub(r"^dbfs:/+", "/dbfs/", location)
