"""Read what was appended to a Delta table since the last run, by Structured Streaming's ``availableNow``.

The stream runs on a thread of the JVM; this module iterates over its micro-batches, so that a job treats a batch like
any other rows. A batch counts as done, and the checkpoint advances, once the next batch is requested; after a failure
the same batch comes again, with the same rows. This module knows nothing of annotations or commits: the output table
ensures that a batch which comes again adds nothing twice (``left``).
"""

import hashlib
import queue
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from pipemax_spark.errors import JobError
from pipemax_spark.job.skipped_commits import first_unread, skipped_commits
from pipemax_spark.storage.hadoop import HadoopFiles
from pipemax_spark.storage.sources import Source
from pipemax_spark.storage.tables import DeltaTable

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_POLL_S = 0.2
_ADAPTIVE = "spark.sql.adaptive.enabled"
_ALL_FILES = str(2**31 - 1)
"""A batch holds everything that is available: its chunks are committed one by one, and the engine drains once."""
_DELTA_CODE = re.compile(r"\[(DELTA_\w+)")
_CHANGES = ("DELTA_SOURCE_TABLE_IGNORE_CHANGES", "DELTA_SOURCE_IGNORE_DELETE")


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamBatch:
    """The permanent name of a micro-batch: within one checkpoint, a batch number always has the same rows."""

    query_id: str
    """The checkpoint's query id."""
    batch_id: int

    def __str__(self) -> str:
        return f"batch {self.batch_id} of stream {self.query_id}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Rows that are processed together: the whole input, or a micro-batch of it."""

    rows: "DataFrame"
    stream: StreamBatch | None = None
    whole: "DataFrame | None" = None
    """For a micro-batch: the whole input at the batch's time or later."""
    compares_all: bool = False
    """All rows of the input, of which those that the output lacks are to be annotated, because rows were inserted by
    commits that the stream skipped."""
    is_small: bool = False
    """Few enough rows to be sent to every task."""


class MicroBatches:
    """The stream's batches: enter it with ``with`` and iterate, once.

    Raise ``JobError`` for an input whose history does not consist only of appends.
    """

    def __init__(
        self,
        spark: "SparkSession",
        source: Source,
        *,
        checkpoints: str,
        purpose: str,
        options: Mapping[str, str],
        skip_changes: bool,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Choose the checkpoint's directory in ``checkpoints`` by the table and ``purpose``, a directory's name.

        So another model, prompt or ``--where`` starts at the table's beginning. ``say`` is told which commits are
        skipped.
        """
        self._spark = spark
        self._table = DeltaTable(spark, source.name)
        self.checkpoint = f"{checkpoints.rstrip('/')}/{self._table.table_id()}-{purpose}"
        self._options = {"maxFilesPerTrigger": _ALL_FILES, **options}
        if skip_changes:
            self._options["skipChangeCommits"] = "true"
        self._read_options = options
        self._say = say
        self._first_unread = first_unread(HadoopFiles(spark), self.checkpoint) if skip_changes else None
        self._offered: queue.SimpleQueue[tuple[DataFrame, int]] = queue.SimpleQueue()
        self._is_done: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._has_open_batch = False

    def __enter__(self) -> Self:
        writer = self._table.read_stream(self._options).writeStream.foreachBatch(self._offer)
        writer = writer.option("checkpointLocation", self.checkpoint).trigger(availableNow=True)
        with _told(self._table.name, self.checkpoint):
            self._query = writer.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._has_open_batch:
            # The batch failed: the stream must fail too, or it would count the batch as done.
            self._is_done.put(False)
        self._query.stop()

    def __iter__(self) -> Iterator[Batch]:
        while (batch := self._next()) is not None:
            self._has_open_batch = True
            yield batch
            # Before the checkpoint passes them: the batch comes again if this fails.
            yield from self._skipped()
            self._has_open_batch = False
            self._is_done.put(True)
        with _told(self._table.name, self.checkpoint):
            self._query.awaitTermination()
        yield from self._skipped()

    def _skipped(self) -> Iterator[Batch]:
        """Tell once which commits the stream skips; yield the whole input if rows were inserted by any of them.

        Called when the stream's end is known, so that no commit is skipped that is not seen here.
        """
        first, self._first_unread = self._first_unread, None
        if first is None:  # told already, or the stream has read the table as it is
            return
        skipped = skipped_commits(self._spark, self._table, first)
        for commit in skipped:
            inserts = ", but rows that it inserted are annotated" if commit.may_insert else ""
            self._say(f"--skip-changes skips {commit} of the input{inserts}")
        if any(commit.may_insert for commit in skipped):
            yield Batch(rows=self._table.read(options=self._read_options), compares_all=True)

    def _next(self) -> Batch | None:
        """Wait for the next batch; return None when the stream has ended, for whatever reason."""
        while True:
            # Check this before reading the queue: whatever was offered before the end is then in the queue.
            is_active = self._query.isActive
            try:
                # With a time limit, so that Ctrl-C reaches this thread.
                rows, batch_id = self._offered.get(timeout=_POLL_S if is_active else 0.01)
            except queue.Empty:
                if not is_active:
                    return None
                continue
            # A stream switches this off for its session: joins with the output would have 200 tasks for any batch.
            rows.sparkSession.conf.set(_ADAPTIVE, self._spark.conf.get(_ADAPTIVE) or "true")
            stream = StreamBatch(query_id=str(self._query.id), batch_id=int(batch_id))
            return Batch(rows=rows, stream=stream, whole=self._table.read(options=self._read_options))

    def _offer(self, rows: "DataFrame", batch_id: int) -> None:
        """Hand the batch over and wait for its end. Called on the stream's thread."""
        self._offered.put((rows, batch_id))
        if not self._is_done.get():
            raise RuntimeError("the batch was given up")


def stream_purpose(spec_hash: str, where: str | None) -> str:
    """Return the purpose of an incremental run's checkpoint, as a directory's name."""
    return spec_hash if where is None else f"{spec_hash}-{hashlib.sha256(where.encode()).hexdigest()[:16]}"


@contextmanager
def _told(name: str, checkpoint: str) -> Iterator[None]:
    """Turn the stream's error about an input that it cannot follow into one sentence with the remedy."""
    from pyspark.errors import StreamingQueryException

    try:
        yield
    except StreamingQueryException as error:
        text = str(error)
        if any(code in text for code in _CHANGES):
            raise JobError(
                f"rows of input {name!r} were updated or deleted since the last run, but --incremental follows only "
                "appends. Give --skip-changes to skip those commits, or run once without --incremental "
                f"({_cause(text)})"
            ) from error
        if _DELTA_CODE.search(text):
            raise JobError(
                f"input {name!r} cannot be followed from the checkpoint {checkpoint}: {_cause(text)}. If the table "
                "was changed just now, run the job again; otherwise delete the checkpoint: a new one begins at the "
                "table's start, and rows that the output holds are not annotated again"
            ) from error
        raise


def _cause(text: str) -> str:
    """Return Delta's own sentence, without Spark's words around it."""
    lines = [line.strip() for line in text.splitlines()]
    return next((line for line in lines if _DELTA_CODE.search(line)), lines[0])
