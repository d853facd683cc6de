"""Servers that die, hang or end: every row comes back exactly once, or the task fails with a reason."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from pipemax.wire import SessionErrorCode
from pipemax_spark.errors import EngineSessionError
from pipemax_spark.executor.client import complete
from tests.fakes.settings import expected_text
from tests.serve.support import (
    SILENCE_S,
    FakeJvm,
    assert_exactly_once,
    at_once,
    files_of,
    options,
    request_batch,
    request_batches,
    run_prompts,
    server_of,
    server_stats,
    shut_down,
)
from tests.waiting import wait_until

EnginePython = Callable[..., str]


def test_a_server_killed_twice_in_a_run_loses_and_duplicates_nothing(
    fake_engine_python: EnginePython, jvm: FakeJvm
) -> None:
    opts = options(fake_engine_python(), max_num_seqs=32)
    batches, taken, killed = [], 0, set()
    for batch in complete(request_batches(2_000, 40), opts, task="task"):
        batches.append(batch)
        taken += batch.num_rows
        if taken > 600 * (len(killed) + 1) and len(killed) < 2:
            killed.add(server_of(opts))
            os.kill(server_of(opts).pid, signal.SIGKILL)
    assert_exactly_once(batches, 2_000)
    assert len(killed) == 2
    assert len(jvm.servers()) == 1


def test_a_kill_after_the_input_has_ended_sends_the_open_rows_again(fake_engine_python: EnginePython) -> None:
    opts = options(fake_engine_python())
    prompts = ["quick", *(f"[[slow 0.3]] {row}" for row in range(39))]
    results = complete([request_batch(prompts)], opts, task="task")
    row_ids = next(results)["row_id"].to_pylist()
    os.kill(server_of(opts).pid, signal.SIGKILL)
    row_ids += [row_id for batch in results for row_id in batch["row_id"].to_pylist()]
    assert sorted(row_ids) == list(range(40))


def test_all_sessions_survive_an_engine_that_dies_once(
    fake_engine_python: EnginePython, tmp_path: Path
) -> None:
    opts = options(fake_engine_python(), latency_s=0.05)

    def session(mark: str) -> list[str]:
        prompts = [f"prompt {row}{mark if row == 100 else ''}" for row in range(200)]
        return [row["text"] for row in run_prompts(prompts, opts)]

    marked, *others = at_once(session, [f" [[die-once {tmp_path}/died]]", "", ""])
    plain = [expected_text(f"prompt {row}") for row in range(200)]
    assert others == [plain, plain]
    assert [text.partition(" [[")[0] for text in marked] == plain
    log = files_of(opts).log.read_text()
    assert "ending: the fake died" in log
    assert log.count("listening") == 2


def test_a_server_that_always_dies_is_given_up_with_its_last_log_lines(
    fake_engine_python: EnginePython,
) -> None:
    opts = options(fake_engine_python(), dies="at once")
    with pytest.raises(EngineSessionError, match="3 times in a row") as caught:
        run_prompts(["one"], opts)
    assert caught.value.code is SessionErrorCode.ENGINE_DIED
    assert str(files_of(opts).log) in str(caught.value)
    assert "the fake died at once, as it was told" in str(caught.value)


def test_deaths_with_completions_between_them_do_not_end_the_task(
    fake_engine_python: EnginePython, tmp_path: Path
) -> None:
    prompts = [
        f"row {row} [[crash-once {tmp_path}/{row}]]" if row % 20 == 10 else f"row {row}" for row in range(80)
    ]
    opts = options(fake_engine_python("--chunk-rows=4"), max_num_seqs=1)
    assert len(run_prompts(prompts, opts)) == 80
    assert files_of(opts).log.read_text().count("listening") == 1 + 4  # more deaths than MAX_DEATHS


def test_an_engine_that_hangs_is_killed_and_its_rows_run_again(
    fake_engine_python: EnginePython, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    opts = options(fake_engine_python("--poll-stall-s=0.3"), silence_timeout_s=SILENCE_S)
    rows = run_prompts(["one", f"[[hang-once {tmp_path}/hung]] two", "three"], opts)
    assert rows[2]["text"] == expected_text("three")
    assert f"it said nothing for {SILENCE_S:.0f} s" in caplog.text
    log = files_of(opts).log.read_text()
    assert "in poll" in log[log.index("Thread 0x") :], "the log says what the engine's thread hung in"


@pytest.mark.long  # a variant of deaths with completions between them
def test_a_server_that_takes_long_to_end_counts_as_one_death(
    fake_engine_python: EnginePython, caplog: pytest.LogCaptureFixture
) -> None:
    opts = options(fake_engine_python(), max_num_seqs=32, child_process=True, latency_s=0.05, close_s=1.0)
    results = complete(request_batches(200, 40), opts, task="task")
    batches = [next(results)]
    wait_until(lambda: server_stats(opts).engine_metrics)
    os.kill(int(server_stats(opts).engine_metrics["child_pid"]), signal.SIGKILL)
    assert_exactly_once([*batches, *results], 200)
    losses = [message for message in caplog.messages if "was lost" in message]
    assert len(losses) == 1
    assert "(1 in a row)" in losses[0]


@pytest.mark.long  # as an engine that dies
def test_an_engine_without_memory_dies_and_its_rows_run_again(
    fake_engine_python: EnginePython, tmp_path: Path
) -> None:
    opts = options(fake_engine_python())
    rows = run_prompts(["one", f"[[memory-once {tmp_path}/mark]] two", "three"], opts)
    assert rows[2]["text"] == expected_text("three")
    assert "MemoryError" in files_of(opts).log.read_text()


def test_a_server_whose_socket_is_deleted_makes_room_for_another(fake_engine_python: EnginePython) -> None:
    opts = options(fake_engine_python(), latency_s=0.2)
    results = complete(request_batches(200, 10), opts, task="task")
    batches = [next(results)]
    first = server_of(opts)
    files_of(opts).socket.unlink()
    assert len(run_prompts(["another task"], opts)) == 1
    assert_exactly_once([*batches, *results], 200)
    assert not first.is_running()
    assert "was deleted" in files_of(opts).log.read_text()


@pytest.mark.long  # as one that hangs
def test_a_suspended_server_is_killed_and_replaced(fake_engine_python: EnginePython) -> None:
    opts = options(fake_engine_python(), silence_timeout_s=SILENCE_S)
    run_prompts(["one"], opts)
    stopped = server_of(opts)
    results = complete([request_batch(["one"]), request_batch(["[[slow 2]] two"], 1)], opts, task="task")
    next(results)
    os.kill(stopped.pid, signal.SIGSTOP)
    assert sum(batch.num_rows for batch in results) == 1
    assert not stopped.is_running()


@pytest.mark.long  # it waits out the silence
def test_a_slow_consumer_is_not_mistaken_for_a_silent_server(fake_engine_python: EnginePython) -> None:
    opts = options(fake_engine_python(), silence_timeout_s=SILENCE_S, latency_s=0.02)
    results = complete(request_batches(200, 10), opts, task="task")
    next(results)
    server = server_of(opts)
    time.sleep(SILENCE_S + 0.5)
    assert sum(batch.num_rows for batch in results) > 0
    assert server_of(opts) == server


@pytest.mark.long  # as one that is killed
def test_a_server_told_to_shut_down_in_a_run_is_replaced(fake_engine_python: EnginePython) -> None:
    opts = options(fake_engine_python(), max_num_seqs=32, close_s=0.3)
    batches, taken, was_told = [], 0, False
    for batch in complete(request_batches(1_000, 40), opts, task="task"):
        batches.append(batch)
        taken += batch.num_rows
        if taken > 300 and not was_told:
            was_told = True
            shut_down(opts)
    assert_exactly_once(batches, 1_000)
    assert files_of(opts).log.read_text().count("listening") == 2
