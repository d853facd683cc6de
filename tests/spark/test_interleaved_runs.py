"""Two or three jobs on one table, stopped and resumed at every commit, against real Spark and Delta.

Each job runs on a thread of its own. It stops before each commit, in the midst of it (its tasks have begun and wait)
and before it is looked for in the table's history; the state machine says who goes on. A job that dies is never
resumed.
"""

import contextlib
import io
import itertools
import json
import queue
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)
from rich.console import Console

from pipemax_spark.errors import JobError
from pipemax_spark.job.annotation_job import AnnotationJob
from pipemax_spark.options import JobOptions
from pipemax_spark.report.terminal import Terminal
from pipemax_spark.storage.fence import LANES
from pipemax_spark.storage.tables import Commit, DeltaTable, Transaction
from tests.spark.conftest import Jobs

ROWS = [(i % 30, f"word {i % 30}") for i in range(40)]
"""Ten rows stand twice: without ids they are counted."""
_LIMIT_S = 240.0


class _Ended(BaseException):
    """Raised in a job that is dead, once the test is over."""


class Steps:
    """Where one job stops, and what resumes it."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True)
        self._directory = directory
        self._number = itertools.count()
        self._stops: queue.Queue[str] = queue.Queue()
        self._go = threading.Semaphore(0)
        self._held: Path | None = None
        self.runs_free = False
        self.is_over = False

    def stop(self, where: str) -> None:
        """On the job's threads: wait until the job is resumed."""
        if not self.runs_free:
            self._stops.put(where)
            self._go.acquire()
        if self.is_over:
            raise _Ended

    @contextlib.contextmanager
    def held(self, rows: Any) -> Iterator[Any]:
        """``rows``, whose first task stops: a run that stands in a commit leaves slots to the others."""
        gate = self._directory / str(next(self._number))
        begun, released = f"{gate}-begun", f"{gate}-released"

        def hold(batches: Iterator[Any]) -> Iterator[Any]:
            import time
            from pathlib import Path

            from pyspark import TaskContext

            context = TaskContext.get()
            if context is not None and context.partitionId() == 0:
                Path(begun).touch()
                while not Path(released).exists():
                    time.sleep(0.02)
            yield from batches

        if self.runs_free:
            Path(released).touch()
        self._held = gate
        try:
            yield rows.mapInArrow(hold, rows.schema)
        finally:
            self._held = None

    def ended(self) -> None:
        self._stops.put("ended")

    def resume(self) -> None:
        """Let the job go on, in whatever way it was stopped."""
        if self._held is not None and Path(f"{self._held}-begun").exists():
            Path(f"{self._held}-released").touch()
        else:
            self._go.release()

    def wait_for_stop(self) -> str:
        """Where the job stops next."""
        deadline_s = time.monotonic() + _LIMIT_S
        while time.monotonic() < deadline_s:
            with contextlib.suppress(queue.Empty):
                return self._stops.get(timeout=0.05)
            held = self._held
            if held is not None and Path(f"{held}-begun").exists() and not Path(f"{held}-released").exists():
                return "in the midst of a commit"
        raise AssertionError("the job neither stops nor ends")

    def run_free(self, *, is_over: bool) -> None:
        """Never stop again; with ``is_over``, end at the next stop."""
        self.runs_free, self.is_over = True, is_over
        if (held := self._held) is not None:
            Path(f"{held}-released").touch()
        for _ in range(100):
            self._go.release()


class SteppedTable(DeltaTable):
    """A Delta table whose commits stop."""

    def __init__(self, spark: Any, name: str, steps: Steps) -> None:
        super().__init__(spark, name)
        self._steps = steps

    def append(self, rows: Any, transaction: Transaction) -> None:
        # The lanes after the first are claimed at once: one of them is stepped for all.
        if any(transaction.note.endswith(f", lane {lane}") for lane in range(2, LANES)):
            super().append(rows, transaction)
            return
        self._steps.stop("before a commit")
        with self._steps.held(rows) as held:
            super().append(held, transaction)

    def find_commit(self, note: str, *, since_version: int) -> Commit | None:
        self._steps.stop("after a commit")
        return super().find_commit(note, since_version=since_version)


class SteppedJob:
    """A job on a thread of its own."""

    def __init__(self, spark: Any, options: JobOptions, directory: Path) -> None:
        self.steps = Steps(directory)
        self.work_dir = options.work_dir
        self.is_dead = False
        self.error: BaseException | None = None
        self._spark = spark
        table = SteppedTable(spark, options.output, self.steps)
        self._job = AnnotationJob(spark, options, Terminal(Console(file=io.StringIO())), table=table)
        self.where = "at its start"
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        self.where = self.steps.wait_for_stop()

    def _run(self) -> None:
        try:
            self._job.run()
        except BaseException as error:
            self.error = error
        finally:
            self.steps.ended()

    @property
    def is_running(self) -> bool:
        return self.where != "ended" and not self.is_dead

    def step(self) -> None:
        self.steps.resume()
        self.where = self.steps.wait_for_stop()

    def finish(self) -> None:
        """Run to the end."""
        self.steps.run_free(is_over=False)
        self._join()

    def die(self, work_dir: Path) -> None:
        """As after kill -9: nothing of it goes on, and its process is gone."""
        self.is_dead = True
        self._spark.sparkContext.cancelJobsWithTag(self._job.run_id)
        for marker in work_dir.glob(f"pipemax/*/{self._job.run_id}/owner.json"):
            owner = json.loads(marker.read_text())
            marker.write_text(json.dumps(owner | {"pid": 2**22 + 1}))

    def clean_up(self) -> None:
        self.steps.run_free(is_over=self.is_dead)
        self._join()

    def _join(self) -> None:
        self._thread.join(_LIMIT_S)
        assert not self._thread.is_alive(), f"the job does not end; it stopped last {self.where}"
        self.where = "ended"


def machine_for(jobs: Jobs, id_columns: tuple[str, ...]) -> type[RuleBasedStateMachine]:
    rows = [(i, f"word {i}") for i in range(40)] if id_columns else ROWS
    jobs.write_input(rows)

    class InterleavedRuns(RuleBasedStateMachine):
        @initialize()
        def begin(self) -> None:
            self.directory = Path(tempfile.mkdtemp(dir=jobs.directory))
            self.output = str(self.directory / "out")
            self.options = replace(jobs.defaults, output=self.output, id_columns=id_columns)
            self.runs: list[SteppedJob] = []
            self.refused: list[SteppedJob] = []
            self.foreign = 0

        def living(self) -> list[SteppedJob]:
            return [run for run in self.runs if run.is_running]

        @precondition(lambda self: len(self.living()) < 3 and len(self.runs) < 5)
        @rule(place=st.sampled_from(["one", "other"]))
        def start(self, place: str) -> None:
            work_dir = str(self.directory / place)
            shares = any(run.work_dir == work_dir for run in self.living())
            options = replace(self.options, work_dir=work_dir)
            run = SteppedJob(jobs.spark, options, self.directory / f"steps-{len(self.runs)}")
            self.runs.append(run)
            if shares:
                assert isinstance(run.error, JobError), "a living job's work directory is refused"
                assert "another job" in str(run.error)
                self.refused.append(run)

        @precondition(lambda self: self.living())
        @rule(data=st.data())
        def step(self, data: st.DataObject) -> None:
            data.draw(st.sampled_from(self.living())).step()
            self.check_nothing_is_doubled()

        @precondition(lambda self: self.living())
        @rule(data=st.data())
        def die(self, data: st.DataObject) -> None:
            run = data.draw(st.sampled_from(self.living()))
            run.die(Path(str(run.work_dir)))

        @precondition(lambda self: Path(self.output, "_delta_log").exists())
        @rule(
            statement=st.sampled_from(
                ["OPTIMIZE {}", "ALTER TABLE {} SET TBLPROPERTIES ('a' = 'b')", "append"]
            )
        )
        def commit_elsewhere(self, statement: str) -> None:
            if statement == "append":
                self.foreign += 1
                frame = jobs.spark.createDataFrame([(-1, "somebody's")], "id long, text string")
                frame.write.format("delta").mode("append").save(self.output)
            else:
                jobs.spark.sql(statement.format(f"delta.`{self.output}`"))

        def annotated(self) -> Counter[Any]:
            table = jobs.spark.read.format("delta").load(self.output)
            return Counter(
                (row["id"], row["text"]) for row in table.where("annotation IS NOT NULL").collect()
            )

        def check_nothing_is_doubled(self) -> None:
            if Path(self.output, "_delta_log").exists():
                assert not self.annotated() - Counter(rows), "rows stand more often than in the input"

        def teardown(self) -> None:
            if not hasattr(self, "runs"):
                return
            try:
                for run in self.living():
                    run.finish()
                for run in self.runs:
                    if run.error is not None and not run.is_dead and run not in self.refused:
                        assert "was taken over by run" in str(run.error)
                last = SteppedJob(
                    jobs.spark,
                    replace(self.options, work_dir=str(self.directory / "last")),
                    self.directory / "steps",
                )
                last.finish()
                assert last.error is None, last.error
                assert self.annotated() == Counter(rows), "each row is there as often as in the input"
                table = jobs.spark.read.format("delta").load(self.output)
                assert table.where("annotation IS NULL").count() == self.foreign
            finally:
                for run in self.runs:
                    run.clean_up()

    return InterleavedRuns


@pytest.mark.parametrize("id_columns", [("id",), pytest.param((), marks=pytest.mark.long)])
@pytest.mark.parametrize(
    ("examples", "steps"), [(1, 8), pytest.param(25, 30, marks=[pytest.mark.long, pytest.mark.all_lanes])]
)
def test_whatever_the_order_of_their_steps_runs_commit_each_row_once(
    jobs: Callable[[], Jobs], id_columns: tuple[str, ...], examples: int, steps: int
) -> None:
    run_state_machine_as_test(
        machine_for(jobs(), id_columns),
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            database=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )
