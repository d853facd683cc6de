"""How a run ends, and that its summary says so: whatever ended it, also where an older summary lies."""

import json
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from pipemax_spark.errors import EndedBy, IfRunning, JobError, JobFailedError, OnError, is_interrupt
from pipemax_spark.request.expected_rows import ExpectedRows
from tests.fakes.settings import fake_config
from tests.spark.conftest import Jobs
from tests.spark.test_killed_job import start_job
from tests.waiting import wait_until

ENDED = ("complete", "rows_left", "ended_by")


class Nights:
    """Runs a job night by night, and reads what its summary says."""

    def __init__(self, run: Jobs) -> None:
        self.run = run
        self.file = run.directory / "last_night.json"

    def __call__(self, rows: list[tuple[Any, ...]] | None = None, **options: Any) -> tuple[Any, ...]:
        """Run the job, on these rows if given; return how it ended by its summary, and its error."""
        if rows is not None:
            self.run.write_input(rows)
        self.file.write_text('{"complete": true, "rows_left": 0, "ended_by": "done"}')
        raised: BaseException | None = None
        summary = None
        try:
            summary = self.run.run(**{"id_columns": ("id",), "summary": str(self.file), **options})
        except (Exception, KeyboardInterrupt) as error:
            raised = error
        told = self.told()
        assert raised is not None or (summary is not None and summary.ended_by == told[2])
        return told, raised

    def told(self, file: Path | None = None) -> tuple[Any, ...]:
        summary = json.loads((file or self.file).read_text())
        return tuple(summary[name] for name in ENDED)


@pytest.fixture
def night(run: Jobs) -> Nights:
    return Nights(run)


def good(first: int, end: int) -> list[tuple[int, str]]:
    return [(i, f"row {i}") for i in range(first, end)]


@pytest.mark.long  # nine runs
def test_every_end_says_in_the_summary_what_ended_the_run_and_what_is_left(night: Nights) -> None:
    """From night to night, on one output; a run that is done is in ``test_job``."""
    run = night.run

    told, error = night(good(0, 30), expect_rows=ExpectedRows.of("31:"))
    assert told == (False, None, "row_count")
    assert isinstance(error, JobError)
    assert "has 30 rows, and --expect-rows allows at least 31" in str(error)
    assert json.loads(night.file.read_text())["rows_in"] == 30
    assert not Path(run.output).exists(), "nothing has begun"

    told, error = night(limit=20, expect_rows=ExpectedRows.of("30:30"))
    assert (told, error) == ((False, 10, "limit"), None)

    done = [(row["id"], row["text"]) for row in run.rows()]
    told, error = night([*done, *((i, None) for i in range(30, 35))])
    assert told == (True, 0, "error_rows")
    assert isinstance(error, JobFailedError)
    of_run = max(run.directory.glob("runs/*/summary.json"), key=lambda path: path.parent.name)
    assert night.told(of_run) == (True, 0, "error_rows")
    told, error = night([*done, (35, None)], on_error=OnError.FAIL)
    assert told == (False, 1, "error_rows")

    told, error = night(engine={"model": "fake", "no_such_field": 1})
    assert told == (False, None, "refused")
    assert isinstance(error, JobError)
    told, error = night([*done, (35, "row 35")], engine=fake_config(start_error="no memory"))
    assert told == (False, 1, "failure")
    of_run = max(run.directory.glob("runs/*/summary.json"), key=lambda path: path.parent.name)
    assert night.told(of_run) == (False, 1, "failure")

    told, error = night([], fail_if_empty=True)
    assert told == (False, None, "row_count")
    assert "has no rows (--fail-if-empty)" in str(error)


@pytest.mark.long  # the first test has each end, test_incremental the nights
def test_incremental_nights_count_what_was_appended(night: Nights) -> None:
    table = str(night.run.directory / "in_table")

    def append(first: int, end: int) -> None:
        rows = night.run.spark.createDataFrame(good(first, end), "id long, text string")
        rows.write.format("delta").mode("append").save(table)

    options = {"input": table, "incremental": True, "fail_if_empty": True}
    append(0, 10)
    told, error = night(**options, expect_rows=ExpectedRows.of(":5"))
    assert told == (False, None, "row_count")
    assert "what was appended to input" in str(error)
    assert "has 10 rows, and --expect-rows allows 0 to 5" in str(error)
    told, error = night(**options, expect_rows=ExpectedRows.of(":10"))
    assert (told, error) == ((True, 0, "done"), None)
    told, error = night(**options)
    assert told == (False, None, "row_count"), "nothing was appended"
    append(10, 13)
    told, error = night(**options, expect_rows=ExpectedRows.of("3:3"))
    assert (told, error) == ((True, 0, "done"), None)


@pytest.mark.usefixtures("interruptible")
def test_an_interrupted_run_says_how_many_rows_are_left(night: Nights) -> None:
    run = night.run
    held, has_ended = run.directory / "held", threading.Event()
    held.touch()

    def interrupt() -> None:
        wait_until(lambda: has_begun(run) or has_ended.is_set(), 300, "the run's first chunk")
        if not has_ended.is_set():
            assert night.told() == (False, None, None), "what a killed run would leave"
            os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        (complete, rows_left, ended_by), error = night(
            good(0, 300), engine=fake_config(model="held", held_by=str(held), held_row_s=60.0)
        )
    finally:
        has_ended.set()
        thread.join()
    assert error is not None
    assert is_interrupt(error), "or its consequence: the call to the JVM that it has broken off"
    assert (complete, rows_left, ended_by) == (False, 300, "interrupt")


@pytest.mark.long  # a process; test_work_directory shows who gives way
def test_a_run_that_finds_another_one_fails_skips_or_takes_over(night: Nights) -> None:
    """The other one is a process of its own, with an engine that never ends."""
    run = night.run
    first_file, held = run.directory / "first.json", run.directory / "held"
    held.touch()
    run.write_input(good(0, 300))
    first = start_job(
        run.defaults,
        *("--id-columns", "id", "--summary", str(first_file)),
        commit_every="1h",
        fake=f"held_by: {held}, held_row_s: 60",
    )
    try:
        wait_until(lambda: first.poll() is not None or has_begun(run), 300, "the first run's first chunk")
        told, error = night()
        assert told == (False, None, "other_run")
        assert isinstance(error, JobError)
        assert "give --if-running skip or take-over" in str(error)
        told, error = night(if_running=IfRunning.SKIP)
        assert (told, error) == ((False, None, "other_run"), None)
        assert "Skipped" in run.printed
        assert first.poll() is None
        told, error = night(if_running=IfRunning.TAKE_OVER)
        assert (told, error) == ((True, 0, "done"), None)
        assert first.wait(120) == 1
    finally:
        if first.poll() is None:
            os.killpg(first.pid, signal.SIGKILL)
            first.wait()
    assert night.told(first_file) == (False, 300, "taken_over")
    assert sorted(row["id"] for row in run.rows()) == list(range(300))


def has_begun(run: Jobs) -> bool:
    return any(Path(run.output, "_pipemax").glob("*/*/manifest.json"))


def test_each_end_has_its_line_in_the_page_of_ends() -> None:
    page = (Path(__file__).parents[2] / "docs" / "guide" / "ends.md").read_text()
    assert [end for end in EndedBy if f"| `{end}` |" not in page] == []
