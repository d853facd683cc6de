"""Rows that kill the engine, through the real server: they are found, and only they become error rows."""

import os
import signal
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from pipemax.wire import ErrorCode
from pipemax_spark.executor.client import EngineOptions, complete
from tests.fakes.settings import expected_text
from tests.serve.support import (
    SILENCE_S,
    at_once,
    files_of,
    options,
    request_batch,
    run_prompts,
    server_of,
)

EnginePython = Callable[..., str]


def _culprits(prompts: Sequence[str], rows: Sequence[dict[str, Any]]) -> list[str]:
    """The prompts condemned; every other row must have its own answer."""
    culprits = []
    for prompt, row in zip(prompts, rows, strict=True):
        if row["error_code"] is None:
            assert row["text"] == expected_text(prompt)
        else:
            assert row["error_code"] == ErrorCode.ENGINE_DIED
            assert "by itself" in row["error_message"]
            culprits.append(prompt)
    return culprits


def _servers_started(opts: EngineOptions) -> int:
    return files_of(opts).log.read_text().count("listening")


def test_one_row_that_kills_the_engine_among_two_sessions_is_an_error_row(
    fake_engine_python: EnginePython,
) -> None:
    opts = options(fake_engine_python(), max_num_seqs=64, latency_s=0.02)
    prompts = [[f"session {session} row {row}" for row in range(8)] for session in range(2)]
    prompts[1][5] += " [[die]]"
    rows = at_once(lambda of_session: run_prompts(of_session, opts), prompts)
    assert _culprits(prompts[0], rows[0]) == []
    assert _culprits(prompts[1], rows[1]) == [prompts[1][5]]
    assert _servers_started(opts) - 1 <= 4 + 2  # log2(16), and the two deaths in runs of one row


@pytest.mark.parametrize("mark", ["[[crash]]", pytest.param("[[abort]]", marks=pytest.mark.long)])
def test_a_row_that_kills_the_whole_server_is_found_and_not_run_again(
    fake_engine_python: EnginePython, mark: str
) -> None:
    opts = options(fake_engine_python(), latency_s=0.02)
    prompts = [f"row {row}" for row in range(8)]
    prompts[6] += f" {mark}"
    assert _culprits(prompts, run_prompts(prompts, opts)) == [prompts[6]]
    started = _servers_started(opts)
    assert started - 1 <= 3 + 2
    # The same row again in this application, in another task: answered without a death.
    again = [prompts[6], "another"]
    assert _culprits(again, run_prompts(again, opts)) == [prompts[6]]
    assert _servers_started(opts) == started


@pytest.mark.long  # as one row that kills
def test_a_row_that_hangs_the_engine_is_found(fake_engine_python: EnginePython) -> None:
    opts = options(fake_engine_python("--poll-stall-s=0.3"), silence_timeout_s=SILENCE_S, latency_s=0.02)
    prompts = ["one", "two [[hang]]", "three"]
    assert _culprits(prompts, run_prompts(prompts, opts)) == [prompts[1]]


def test_a_task_that_ends_leaves_no_suspects_behind(fake_engine_python: EnginePython) -> None:
    opts = options(fake_engine_python())
    results = complete(
        [request_batch(["quick", *(f"[[slow 600]] row {row}" for row in range(20))])], opts, task="task"
    )
    next(results)
    os.kill(server_of(opts).pid, signal.SIGKILL)
    started_s = time.monotonic()
    results.close()
    prompts = [f"row {row}" for row in range(30)]
    assert _culprits(prompts, run_prompts(prompts, opts)) == []
    assert time.monotonic() - started_s < 60.0  # not the 600 s that the ended task's rows would take
