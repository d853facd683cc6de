"""``annotate_table``: the command's job and words, called from Python."""

import json
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipemax_spark import annotate_table
from pipemax_spark.errors import JobError
from tests.fakes.settings import expected_text, fake_config
from tests.spark.conftest import Jobs
from tests.spark.test_killed_job import committed_chunks
from tests.waiting import wait_until


@pytest.fixture
def call(run: Jobs) -> tuple[Jobs, Callable[..., Any]]:
    """Input and output of a job, and the function with what every call here has in common."""

    def call_with(**options: Any) -> Any:
        defaults = {
            "input": run.defaults.input,
            "output": run.output,
            "template": "Say {text}",
            "engine": fake_config(model="from-python"),
            "engine_python": run.defaults.engine_python,
            "max_tokens": 16,
            "mlflow_experiment": "",
            "log_dir": run.directory / "logs",
        }
        return annotate_table(run.spark, **{**defaults, **options})

    return run, call_with


@pytest.mark.long  # two jobs for two files
def test_engine_and_summary_may_be_on_the_storage_that_the_session_knows(
    call: tuple[Jobs, Callable[..., Any]],
) -> None:
    run, annotate = call
    run.write_input([(0, "one")])
    mounted = run.directory / "mounted"
    mounted.mkdir()
    mount = run.directory.parent.name + run.directory.name  # Hadoop keeps a mount table for the JVM's life
    configuration = run.spark._jsc.hadoopConfiguration()
    configuration.set(f"fs.viewfs.mounttable.{mount}.link./files", f"file://{mounted}")
    (mounted / "engine.yaml").write_text("model: stored\n")
    storage = f"viewfs://{mount}/files"
    summary = annotate(engine=f"{storage}/engine.yaml", summary=f"{storage}/totals/summary.json")
    assert json.loads((mounted / "totals" / "summary.json").read_text())["rows_out"] == summary.rows_out == 1
    for options, told in (
        ({"engine": f"{storage}/no.yaml"}, "no.yaml' cannot be read: there is no such file"),
        ({"engine": "oddfs://x/engine.yaml"}, "engine 'oddfs://x/engine.yaml' cannot be read: .*oddfs"),
        (
            {"summary": "oddfs://x/summary.json"},
            "summary 'oddfs://x/summary.json' cannot be written: .*oddfs",
        ),
    ):
        with pytest.raises(JobError, match=told):
            annotate(**options)


@pytest.mark.long  # test_ends interrupts a job
@pytest.mark.usefixtures("interruptible")
def test_an_interrupted_call_stops_its_tasks_and_the_same_call_does_the_rest(
    call: tuple[Jobs, Callable[..., Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    run, annotate = call
    run.write_input([(i, f"word {i}") for i in range(3_000)])
    held = run.directory / "held"
    held.touch()
    slow = fake_config(model="interrupted", held_by=str(held), held_row_s=0.01)
    has_ended = threading.Event()

    def interrupt() -> None:
        wait_until(lambda: committed_chunks(run.output) >= 1 or has_ended.is_set(), 300, "a committed chunk")
        if not has_ended.is_set():
            os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            annotate(engine=slow, commit_every="1s")
    finally:
        has_ended.set()
        thread.join()
    assert "Interrupted. Finished chunks are committed" in capsys.readouterr().out
    tracker = run.spark.sparkContext.statusTracker()
    wait_until(lambda: not tracker.getActiveStageIds(), 120, "the tasks' end")
    summary = annotate(engine=fake_config(model="interrupted"))
    assert 0 < summary.rows_skipped < 3_000
    assert summary.rows_skipped + summary.rows_out == 3_000
    assert sorted(row["id"] for row in run.rows()) == list(range(3_000))
    assert all(row["annotation"]["text"] == expected_text(f"Say {row['text']}", 16) for row in run.rows())


@pytest.mark.parametrize(
    ("options", "error", "told"),
    [
        ({"commit_every": "often"}, JobError, "commit-every is 'often'; write it as 15m"),
        ({"on_error": "skip"}, JobError, "on-error is 'skip'"),
        ({"expect_rows": (2, 1)}, JobError, "expect-rows is .*minimum is above"),
        ({"response_format": "{"}, JobError, "response-format is not JSON"),
        ({"engine": "/no/such/file"}, JobError, "engine '/no/such/file' cannot be read"),
        ({"output": None}, TypeError, "annotate_table.. needs output"),
    ],
)
def test_a_wrong_call_is_reported_at_once(
    call: tuple[Jobs, Callable[..., Any]], options: dict[str, Any], error: type[Exception], told: str
) -> None:
    run, annotate = call
    with pytest.raises(error, match=told):
        annotate(**options)
    assert not Path(run.output).exists()
