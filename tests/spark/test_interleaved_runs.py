"""Two or three jobs on one table, stopped and resumed at every commit, against real Spark and Delta.

Each job runs on a thread of its own. It stops before each commit, in the midst of it (its tasks have begun and wait)
and before it is looked for in the table's history; a seeded random generator says who goes on. A job that dies is never
resumed, and its tasks end with it. Hypothesis is of no use here: its first examples are the simplest ones, in which no
job is ever stepped, each costs a minute, and it would shrink one that fails for hours.
"""

import contextlib
import io
import itertools
import json
import os
import queue
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
from rich.console import Console

from pipemax_spark.errors import JobError
from pipemax_spark.job.annotation_job import AnnotationJob
from pipemax_spark.options import JobOptions
from pipemax_spark.report.terminal import Terminal
from pipemax_spark.storage.fence import LANES, is_claim
from pipemax_spark.storage.hadoop import HadoopFiles
from pipemax_spark.storage.tables import Commit, DeltaTable, Transaction
from tests.spark.conftest import Jobs

ROWS = [(i % 30, f"word {i % 30}") for i in range(40)]
"""Ten rows stand twice: without ids they are counted."""
NIGHT = int(os.environ.get("PIPEMAX_NIGHT") or 0)
SEED = 206
"""Of an order in which a run dies, another writer commits, and two runs stand before the commit of the same rows."""
ABOUT_TO_COMMIT_ROWS = "before a commit of rows"
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
        self.is_dead = False
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
        """``rows``, whose first task stops: a run that stands in a commit leaves slots to the others.

        If the job dies meanwhile, the task fails, and the job does not learn of it.
        """
        gate = self._directory / str(next(self._number))
        begun, released, killed = f"{gate}-begun", f"{gate}-released", f"{gate}-killed"

        def hold(batches: Iterator[Any]) -> Iterator[Any]:
            import time
            from pathlib import Path

            from pyspark import TaskContext

            context = TaskContext.get()
            if context is not None and context.partitionId() == 0:
                Path(begun).touch()
                while not Path(released).exists():
                    if Path(killed).exists():
                        raise RuntimeError("the driver is dead")
                    time.sleep(0.02)
            yield from batches

        if self.runs_free:
            Path(released).touch()
        self._held = gate
        try:
            yield rows.mapInArrow(hold, rows.schema)
        finally:
            self._held = None
            if self.is_dead:
                self.stop("after its death")

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

    def die(self) -> None:
        """End the task that is held, as it ends with its driver: a dead job holds no slot."""
        self.is_dead = True
        if (held := self._held) is not None:
            Path(f"{held}-killed").touch()

    def run_free(self) -> None:
        """Never stop again; a dead job ends where it stopped."""
        self.runs_free, self.is_over = True, self.is_dead
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
        self._steps.stop("before a commit" if is_claim(transaction.note) else ABOUT_TO_COMMIT_ROWS)
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
        self.error: BaseException | None = None
        self._files = HadoopFiles(spark)
        table = SteppedTable(spark, options.output, self.steps)
        self._job = AnnotationJob(spark, options, Terminal(Console(file=io.StringIO())), table=table)
        self.run_id = self._job.run_id
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
        return self.where != "ended" and not self.steps.is_dead

    def step(self) -> None:
        self.steps.resume()
        self.where = self.steps.wait_for_stop()

    def finish(self) -> None:
        """Run to the end; a dead job ends where it stopped."""
        self.steps.run_free()
        self._thread.join(_LIMIT_S)
        assert not self._thread.is_alive(), f"the job does not end; it stopped last {self.where}"
        self.where = "ended"

    def die(self) -> None:
        """As after kill -9: nothing of it goes on, and its process is gone."""
        self.steps.die()
        for marker in Path(str(self.work_dir)).glob(f"pipemax/*/{self.run_id}/owner.json"):
            owner = json.loads(marker.read_text())
            self._files.write_text(str(marker), json.dumps(owner | {"pid": 2**22 + 1}))  # with its checksum


class InterleavedRuns:
    """Some runs on one table; ``go_on`` takes one step of any of them, and ``end`` all that are left."""

    def __init__(self, jobs: Jobs, id_columns: tuple[str, ...], rng: Random) -> None:
        self._rows = [(i, f"word {i}") for i in range(40)] if id_columns else ROWS
        jobs.write_input(self._rows)
        self._spark, self._directory, self._rng = jobs.spark, jobs.directory, rng
        self._options = replace(jobs.defaults, id_columns=id_columns)
        self._output = jobs.output
        self._runs: list[SteppedJob] = []
        self._refused: list[SteppedJob] = []
        self._foreign = 0

    def go_on(self) -> None:
        """Start a run, or let one go on to its next stop, or die, or commit as another writer does."""
        living = [run for run in self._runs if run.is_running]
        weights = {
            "start": 3 if len(living) < 3 and len(self._runs) - len(self._refused) < 6 else 0,
            "step": 6 if living else 0,
            "die": 1 if living else 0,
            "commit elsewhere": 1 if Path(self._output, "_delta_log").exists() else 0,
        }
        match self._rng.choices([*weights], [*weights.values()])[0]:
            case "start":
                self._start(living)
            case "step":
                self._step(self._rng.choice(living))
                assert not self._annotated() - Counter(self._rows), "rows stand more often than in the input"
            case "die":
                run = self._rng.choice(living)
                print(run.run_id, "dies", run.where)
                run.die()
            case _:
                self._commit_elsewhere()

    def _start(self, living: list[SteppedJob]) -> None:
        work_dir = str(self._directory / self._rng.choice(["one", "other"]))
        options = replace(self._options, work_dir=work_dir)
        run = SteppedJob(self._spark, options, self._directory / f"steps-{len(self._runs)}")
        print(run.run_id, "starts in", work_dir, "and stands", run.where)
        self._runs.append(run)
        if any(other.work_dir == work_dir for other in living):
            assert isinstance(run.error, JobError), "a living job's work directory is refused"
            assert "another job" in str(run.error)
            self._refused.append(run)

    def _step(self, run: SteppedJob) -> None:
        """Let it go on to its next stop, or as far as its rows: two runs that stand there could commit rows twice."""
        goes_far = self._rng.random() < 0.5
        run.step()
        while goes_far and run.is_running and run.where != ABOUT_TO_COMMIT_ROWS:
            run.step()
        print(run.run_id, "goes on and stands", run.where)

    def _commit_elsewhere(self) -> None:
        statement = self._rng.choice(
            ["OPTIMIZE {}", "ALTER TABLE {} SET TBLPROPERTIES ('a' = 'b')", "append"]
        )
        print(statement)
        if statement == "append":
            self._foreign += 1
            frame = self._spark.createDataFrame([(-1, "somebody's")], "id long, text string")
            frame.write.format("delta").mode("append").save(self._output)
        else:
            self._spark.sql(statement.format(f"delta.`{self._output}`"))

    def _annotated(self) -> Counter[Any]:
        table = self._spark.read.format("delta").load(self._output)
        return Counter((row["id"], row["text"]) for row in table.where("annotation IS NOT NULL").collect())

    def end(self) -> None:
        """Run all that live to their ends, and then another run, which does what is left."""
        for run in self._runs:
            if run.is_running:
                run.finish()
        for run in self._runs:
            if run.error is not None and not run.steps.is_dead and run not in self._refused:
                assert "was taken over by run" in str(run.error)
        options = replace(self._options, work_dir=str(self._directory / "last"))
        last = SteppedJob(self._spark, options, self._directory / "steps")
        last.finish()
        assert last.error is None, last.error
        assert self._annotated() == Counter(self._rows), "each row is there as often as in the input"
        table = self._spark.read.format("delta").load(self._output)
        assert table.where("annotation IS NULL").count() == self._foreign

    def clean_up(self) -> None:
        for run in self._runs:
            run.finish()


def check_interleaved(jobs: Jobs, id_columns: tuple[str, ...], *, seed: int, steps: int) -> None:
    runs = InterleavedRuns(jobs, id_columns, Random(seed))
    try:
        for _ in range(steps):
            runs.go_on()
        runs.end()
    finally:
        runs.clean_up()


def test_whatever_the_order_of_their_steps_runs_commit_each_row_once(run: Jobs) -> None:
    check_interleaved(run, ("id",), seed=SEED, steps=8)


@pytest.mark.long
@pytest.mark.all_lanes
@pytest.mark.parametrize("seed", range(2 * NIGHT, 2 * NIGHT + 2))
@pytest.mark.parametrize("id_columns", [("id",), ()], ids=["ids", "no ids"])
def test_each_night_other_orders_of_more_steps_commit_each_row_once(
    run: Jobs, id_columns: tuple[str, ...], seed: int
) -> None:
    check_interleaved(run, id_columns, seed=seed, steps=16)
