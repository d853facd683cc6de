"""Read what was appended to a Delta table since the last run, by Structured Streaming's ``availableNow``.

Each run has a stream of its own, from the version up to which the last run had read (``position``); the first run, and
one that is told to, compares all rows of the table with the output instead. The stream runs on a thread of the JVM;
this module iterates over its micro-batches, so that a job treats a batch like any other rows. The position advances
once the batch after the last one is requested; after a failure the same rows come again, and the output's rows ensure
that these add nothing twice (``left``). Inputs whose changes can be read are followed without a stream (``following``).
"""

import queue
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from pipemax_spark.errors import JobError, cause_of
from pipemax_spark.options import JobOptions
from pipemax_spark.rows.checked import Checked
from pipemax_spark.rows.position import RESCAN, Position, Positions, cannot_follow, check_position
from pipemax_spark.rows.skipped_commits import skipped_commits
from pipemax_spark.rows.workdir import WorkDirectory
from pipemax_spark.storage.tables import DeltaTable

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

_POLL_S = 0.2
_ADAPTIVE = "spark.sql.adaptive.enabled"
_ALL_FILES = str(2**31 - 1)
"""A batch holds everything that is available: its chunks are committed one by one, and the engine drains once."""
_BEGINNINGS = ("startingversion", "startingtimestamp")
_CHOOSING = (*_BEGINNINGS, "excluderegex")
"""Delta's options that leave a part of the table out of a stream, in lower case."""
_LOSING = {"failondataloss": "false", "ignoremissingfiles": "true", "ignorecorruptfiles": "true"}
_DELTA_CODE = re.compile(r"\[(DELTA_\w+)")
"""Finds the name of Delta's error in its message."""
_CHANGES = ("DELTA_SOURCE_TABLE_IGNORE_CHANGES", "DELTA_SOURCE_IGNORE_DELETE")
_GONE = ("FILE_NOT_EXIST", "FileNotFoundException", "DELTA_FILE_NOT_FOUND")


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamBatch:
    """The name of a micro-batch, whose rows were appended."""

    query_id: str
    """Different in each run."""
    batch_id: int
    since: int | None
    """The version of the table after which the stream began; None if the user's options say where."""

    def __str__(self) -> str:
        return f"batch {self.batch_id} of stream {self.query_id}"

    @property
    def title(self) -> str:
        """What it is in the job's output."""
        return f"batch {self.batch_id}"


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionRange:
    """The name of the rows that were added or changed between two versions of a table."""

    since: int
    until: int

    def __str__(self) -> str:
        return f"versions {self.since} to {self.until} of the input"

    @property
    def title(self) -> str:
        """See ``StreamBatch``."""
        return f"versions {self.since} to {self.until}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Rows that are processed together: the whole input, or a part of it."""

    rows: "DataFrame"
    part: StreamBatch | VersionRange | None = None
    """Names the part; None for the whole input."""
    whole: "DataFrame | None" = None
    """Where the rows are a part of the input: the whole input at the batch's time or later."""
    compares_all: bool = False
    """All rows of the input, of which those that the output lacks are to be annotated; ids may be there twice."""
    counts_all: bool = False
    """With ``compares_all``: rows that the output holds count as rows of the input, too."""
    finds_changed: bool = False
    """A row whose ids are in the output is left, too, if it makes another request there, and replaces that row."""
    kept_ids: "DataFrame | None" = None
    """The ids of the batch's rows, or of the whole input, before ``--where``; None if nobody asks."""
    gone_ids: "DataFrame | None" = None
    """The ids of rows that the input had and has no more; None if nobody asks."""
    is_small: bool = False
    """Few enough rows to be sent to every task."""


class MicroBatches:
    """The rows that were appended since the last run: enter it with ``with`` and iterate, once.

    Raise ``JobError`` for an input whose history does not consist only of appends, or that cannot be followed from
    where the last run ended.
    """

    def __init__(
        self,
        spark: "SparkSession",
        options: JobOptions,
        checked: Checked,
        work: WorkDirectory,
        positions: Positions,
        *,
        remedy: str = "",
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Read on from the position. ``say`` is told which commits are skipped.

        ``remedy`` says what would have changes followed, for the error of an input of which rows were changed.
        """
        self._spark = spark
        self._source = checked.source
        self._table = DeltaTable(spark, checked.source.name)
        self._positions = positions
        self._remedy = remedy
        self._stream_directory = f"{work.path}/stream"
        self._options = {"maxFilesPerTrigger": _ALL_FILES, **options.input_option}
        self._skips_changes = options.skip_changes
        self._rescans = options.rescan
        self._chosen = _checked_choices(options.input_option, rescan=options.rescan)
        self._read_options = {
            name: value for name, value in options.input_option.items() if name not in self._chosen
        }
        self._say = say
        self._position: Position | None = None
        self._end = 0
        """The version up to which this run reads at least."""
        self._query: StreamingQuery | None = None
        self._offered: queue.SimpleQueue[tuple[DataFrame, int]] = queue.SimpleQueue()
        self._is_done: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._has_open_batch = False

    def __enter__(self) -> Self:
        self._position = None if self._rescans else self._positions.read()
        if self._position is None and not self._chosen:
            assert self._source.version is not None, self._source
            self._end = self._source.version
            return self
        # Before the stream begins, which reads at least up to here. The next run finds done what it reads beyond.
        self._end = self._table.version()
        if self._position is not None:
            check_position(self._table, self._position, self._end)
            if self._position.version == self._end:
                return self
        with self._explained():
            self._query = self._start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._query is None:
            return
        if self._has_open_batch:
            # The batch failed: the stream must fail too, or it would go on to the next one.
            self._is_done.put(False)
        self._query.stop()

    def __iter__(self) -> Iterator[Batch]:
        if self._position is None and not self._chosen:
            yield Batch(rows=self._source.rows, compares_all=True, counts_all=True)
        if self._query is not None:
            yield from self._appended(self._query)
            yield from self._inserted_by_skipped()
        self._positions.write(self._end, self._table.commit_mark(self._end))

    def _start(self) -> "StreamingQuery":
        options = dict(self._options)
        if self._position is not None:
            options = {name: value for name, value in options.items() if name.lower() not in _BEGINNINGS}
            options["startingVersion"] = str(self._position.version + 1)
        if self._skips_changes:
            options["skipChangeCommits"] = "true"
        writer = self._table.read_stream(options).writeStream.foreachBatch(self._offer)
        return writer.option("checkpointLocation", self._stream_directory).trigger(availableNow=True).start()

    def _appended(self, query: "StreamingQuery") -> Iterator[Batch]:
        """Yield the stream's batches, and raise its error if it fails."""
        while (batch := self._next(query)) is not None:
            self._has_open_batch = True
            yield batch
            self._has_open_batch = False
            self._is_done.put(True)
        with self._explained():
            query.awaitTermination()

    def _inserted_by_skipped(self) -> Iterator[Batch]:
        """Tell which commits were skipped; yield the whole input if rows were inserted by any of them."""
        if not self._skips_changes or self._position is None:
            return
        skipped = skipped_commits(self._spark, self._table, self._position.version + 1, self._end)
        for commit in skipped:
            inserts = ", but rows that it inserted are annotated" if commit.may_insert else ""
            self._say(f"--skip-changes skips {commit} of the input{inserts}")
        if any(commit.may_insert for commit in skipped):
            yield Batch(rows=self._table.read(options=self._read_options), compares_all=True)

    def _next(self, query: "StreamingQuery") -> Batch | None:
        """Wait for the next batch; return None when the stream has ended, for whatever reason."""
        while True:
            # Check this before reading the queue: whatever was offered before the end is then in the queue.
            is_active = query.isActive
            try:
                # With a time limit, so that Ctrl-C reaches this thread.
                rows, batch_id = self._offered.get(timeout=_POLL_S if is_active else 0.01)
            except queue.Empty:
                if not is_active:
                    return None
                continue
            # A stream switches this off for its session: joins with the output would have 200 tasks for any batch.
            rows.sparkSession.conf.set(_ADAPTIVE, self._spark.conf.get(_ADAPTIVE) or "true")
            since = None if self._position is None else self._position.version
            stream = StreamBatch(query_id=str(query.id), batch_id=int(batch_id), since=since)
            return Batch(rows=rows, part=stream, whole=self._table.read(options=self._read_options))

    def _offer(self, rows: "DataFrame", batch_id: int) -> None:
        """Hand the batch over and wait for its end. Called on the stream's thread."""
        self._offered.put((rows, batch_id))
        if not self._is_done.get():
            raise RuntimeError("the batch was given up")

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Turn the stream's error about an input that it cannot follow into one sentence with the remedy."""
        from pyspark.errors import PySparkException

        try:
            yield
        except PySparkException as error:
            name, text = self._table.name, str(error)
            if any(code in text for code in _CHANGES):
                raise JobError(
                    f"rows of input {name!r} were updated or deleted since the last run, but --incremental follows "
                    f"only appends here. {self._remedy}Give --skip-changes to skip those commits. "
                    f"{RESCAN.replace('Give', 'Or give', 1)} ({_cause(text)})"
                ) from error
            if self._position is not None and is_unreadable(text):
                raise cannot_follow(name, self._position.version, _cause(text)) from error
            if _DELTA_CODE.search(text):
                named = " and ".join(self._chosen)
                raise JobError(
                    f"input {name!r} cannot be followed as input option {named} says: {_cause(text)}. Give another "
                    "value, or leave the option out, to annotate all rows that the output lacks"
                ) from error
            raise


@contextmanager
def reading(name: str, batch: Batch) -> Iterator[None]:
    """While rows of the batch are read for the first time, say what it means that files of the input are gone."""
    try:
        yield
    except Exception as error:
        part = batch.part
        if isinstance(error, JobError) or part is None or part.since is None or not is_gone(str(error)):
            raise
        why = (
            f"files that were appended since are gone, as after an OPTIMIZE and a VACUUM ({cause_of(error)})"
        )
        raise cannot_follow(name, part.since, why) from error


def _checked_choices(options: Mapping[str, str], *, rescan: bool) -> list[str]:
    """Return which of the input's options leave a part of it out. Raise ``JobError`` for those that cannot be kept."""
    for name, value in options.items():
        if _LOSING.get(name.lower()) == value.lower():
            raise JobError(
                f"input option {name}={value} would leave rows out in silence; without it, a night that cannot go on "
                "says so, and --rescan repairs it"
            )
    chosen = [name for name in options if name.lower() in _CHOOSING]
    if chosen and rescan:
        raise JobError(
            f"--rescan compares all rows of the input, and input option {chosen[0]} leaves some out; leave out one of "
            "the two"
        )
    return chosen


def is_gone(text: str) -> bool:
    """Tell whether an error says that files of a table are gone."""
    return any(code in text for code in _GONE)


def is_unreadable(text: str) -> bool:
    """Tell whether an error says that rows or changes of a Delta table cannot be read any more."""
    return _DELTA_CODE.search(text) is not None or is_gone(text)


def _cause(text: str) -> str:
    """Return Delta's own sentence, without Spark's words around it."""
    lines = [line.strip() for line in text.splitlines()]
    return next((line for line in lines if _DELTA_CODE.search(line)), lines[0])
