"""A job on threads of this process that dies, or is paused, before or after one of its operations on storage.

A dead job's threads stand still until the history is over: as after kill -9, nothing of it goes on, nothing of it is
cleaned up, and the process that its marker names is gone. What Spark was doing for it at that moment ends first.
"""

import contextlib
import io
import itertools
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession
from rich.console import Console

from pipemax_spark.job import runner
from pipemax_spark.job.annotation_job import AnnotationJob
from pipemax_spark.options import JobOptions
from pipemax_spark.report.terminal import Terminal
from pipemax_spark.rows import chunks
from pipemax_spark.rows.workdir import work_base
from pipemax_spark.storage import fence
from pipemax_spark.storage.hadoop import HadoopFiles
from pipemax_spark.storage.iceberg import IcebergTable
from pipemax_spark.storage.output_table import open_table
from pipemax_spark.storage.tables import CommitHistory, DeltaTable

_OPERATIONS: dict[type, tuple[str, ...]] = {
    DeltaTable: ("append", "merge", "create", "add_columns", "set_properties", "compact"),
    IcebergTable: ("append", "_commit", "replace", "create", "add_columns", "set_properties", "compact"),
    CommitHistory: ("find_commit", "notes", "commits_since"),
    HadoopFiles: ("write_text", "delete", "put"),
}
"""Where a job may stop. One operation may call another one."""
_HEART = "pipemax-work-dir"
"""The thread of a run's heartbeat, whose writes come by the clock: they stop with the run, and are not counted."""
_LIMIT_S = 240.0
_DRIVER = "_pipemax_driver"


class Driver:
    """A run of a job, which begins at once and stops at its operation number ``stops_at``."""

    def __init__(self, session: Any, options: JobOptions, *, stops_at: int | None) -> None:
        self.error: BaseException | None = None
        self.summary: Any = None
        self.stopped: str | None = None
        """The operation at which it has stopped."""
        self._stops_at = stops_at
        self._numbers = itertools.count(1)
        self._changed = threading.Condition()
        self._has_ended = self._is_halted = self._is_over = False
        self._num_busy = 0
        self._printed = io.StringIO()
        # A session of its own, with the settings of this one, as a job has in a process of its own.
        spark = SparkSession(session.sparkContext, session._jsparkSession.cloneSession())
        self._spark, self._options = spark, options
        self._job = AnnotationJob(spark, options, Terminal(Console(file=self._printed, width=200)))
        self.run_id = self._job.run_id
        self._thread = threading.Thread(target=self._run, daemon=True)
        setattr(self._thread, _DRIVER, self)
        self._thread.start()

    @property
    def printed(self) -> str:
        return self._printed.getvalue()

    def wait(self) -> bool:
        """Wait until the job has ended or stands still; return whether it has ended."""
        with self._changed:
            is_quiet = self._changed.wait_for(
                lambda: self._has_ended or (self._is_halted and self._num_busy == 0), _LIMIT_S
            )
        assert is_quiet, f"the job neither stops nor ends; it has printed {self.printed}"
        return self._has_ended

    def resume(self) -> None:
        with self._changed:
            self._is_halted = False
            self._changed.notify_all()

    def die(self) -> None:
        """Name a process that is gone in the marker of the stopped job."""
        table = open_table(self._spark, self._options.output)
        if not table.exists():
            return
        base = work_base(self._options.work_dir, table.location())
        for marker in Path(base).rglob(f"{self.run_id}/owner.json"):
            owner = json.loads(marker.read_text())
            HadoopFiles(self._spark).write_text(str(marker), json.dumps(owner | {"pid": 2**22 + 1}))

    def close(self) -> None:
        """End the threads of a job that stands still, whatever they were about to do."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()
        self._thread.join(_LIMIT_S)

    def _run(self) -> None:
        try:
            self.summary = self._job.run()
        except BaseException as error:
            self.error = error
        finally:
            with self._changed:
                self._has_ended = True
                self._changed.notify_all()

    def operate(self, name: str, operation: Callable[[], Any]) -> Any:
        """On a thread of the job: stop before it or after it, or let it run."""
        is_heart = threading.current_thread().name == _HEART
        self._pass(f"before {name}", is_heart=is_heart)
        with self._changed:
            self._num_busy += 1
        try:
            result = operation()
        finally:
            with self._changed:
                self._num_busy -= 1
                self._changed.notify_all()
        self._pass(f"after {name}", is_heart=is_heart)
        return result

    def _pass(self, place: str, *, is_heart: bool) -> None:
        with self._changed:
            if not is_heart and not self._is_halted and next(self._numbers) == self._stops_at:
                self._is_halted, self.stopped = True, place
            if not self._is_halted:
                return
            # A thread may stop within an operation that another one had called.
            self._num_busy -= _depth()
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._is_over or not self._is_halted)
            self._num_busy += _depth()
            if self._is_over:
                raise SystemExit  # of which a thread prints nothing; of a subclass it would


_local = threading.local()


def _depth() -> int:
    """Return how many operations this thread is in, one within the other."""
    return getattr(_local, "depth", 0)


@contextlib.contextmanager
def watched() -> Iterator[None]:
    """Let jobs stop at their operations, and have them commit few rows in several chunks over two lanes."""
    with pytest.MonkeyPatch.context() as patch:
        start = threading.Thread.start

        def start_for_driver(thread: threading.Thread) -> None:
            if not hasattr(thread, _DRIVER):
                setattr(thread, _DRIVER, getattr(threading.current_thread(), _DRIVER, None))
            start(thread)

        patch.setattr(threading.Thread, "start", start_for_driver)
        for owner, names in _OPERATIONS.items():
            for name in names:
                patch.setattr(owner, name, _stopping(getattr(owner, name), name))
        for module in (fence, runner):
            patch.setattr(module, "LANES", 2)
        patch.setattr(chunks, "_MAX_SLICES", 6)
        patch.setattr(chunks, "_MIN_SLICE_ROWS_PER_SLOT", 1)
        patch.setattr(chunks, "_MIN_FIRST_ROWS_PER_SLOT", 2)
        yield


def _stopping(operation: Callable[..., Any], name: str) -> Callable[..., Any]:
    def stopping(*arguments: Any, **named: Any) -> Any:
        driver: Driver | None = getattr(threading.current_thread(), _DRIVER, None)
        if driver is None:
            return operation(*arguments, **named)

        def run() -> Any:
            _local.depth = _depth() + 1
            try:
                return operation(*arguments, **named)
            finally:
                _local.depth -= 1

        return driver.operate(name, run)

    return stopping
