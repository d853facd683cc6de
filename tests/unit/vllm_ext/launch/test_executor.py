"""How a worker ended is recorded, unless vLLM ended it itself."""

import multiprocessing
import os
import signal
import time

import pytest

from pipemax.node.failure_records import FAILURES_VARIABLE, FailureRecords
from pipemax.vllm_ext.seam.executor import RecordingExecutor

_PROCESSES = multiprocessing.get_context("fork")


def make_executor(*, has_started: bool, is_failed: bool = False) -> RecordingExecutor:
    executor = RecordingExecutor.__new__(RecordingExecutor)  # vLLM's own constructor starts workers
    executor.is_failed = is_failed
    if has_started:
        executor.workers = ["ready"]
    return executor


def test_workers_that_were_killed_or_left_are_recorded_and_those_that_vllm_ends_are_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    records = FailureRecords()
    monkeypatch.setenv(FAILURES_VARIABLE, records.path)
    monkeypatch.setenv("VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS", "0")
    left, done = (
        _PROCESSES.Process(target=os._exit, args=(status,), name=f"Left{status}") for status in (3, 0)
    )
    killed, hanging = (
        _PROCESSES.Process(target=time.sleep, args=(60,), name=name) for name in ("Killed", "Hangs")
    )
    for process in (left, done, killed, hanging):
        process.start()
    left.join()
    done.join()
    os.kill(killed.pid or 0, signal.SIGKILL)
    killed.join()
    executor = make_executor(has_started=True, is_failed=True)
    executor._ensure_worker_termination([left, done, killed, hanging])
    hanging.join()
    assert [(failure.process, failure.exit_code) for failure in records.read()] == [
        ("Left3", 3),
        ("Killed", -9),
    ]
    assert hanging.exitcode == -signal.SIGTERM
    records.close()


def test_a_worker_that_is_still_dying_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    records = FailureRecords()
    monkeypatch.setenv(FAILURES_VARIABLE, records.path)
    dying = _PROCESSES.Process(target=_end_after_its_pipe, name="Dying")
    dying.start()
    make_executor(has_started=False)._ensure_worker_termination([dying])
    assert [failure.exit_code for failure in records.read()] == [7]
    records.close()


@pytest.mark.parametrize("has_started", [True, False])
def test_a_worker_that_is_told_to_end_may_take_longer_than_vllm_gives_it(
    has_started: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that unpins a large pool; at a start that failed it may hang, and is ended."""
    monkeypatch.setenv("VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS", "0")
    unpinning = _PROCESSES.Process(target=time.sleep, args=(2.5,))
    unpinning.start()
    make_executor(has_started=has_started)._ensure_worker_termination([unpinning])
    unpinning.join()
    assert unpinning.exitcode == (0 if has_started else -signal.SIGTERM)


def _end_after_its_pipe() -> None:
    time.sleep(0.2)
    os._exit(7)
