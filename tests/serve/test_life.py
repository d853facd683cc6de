"""When the server ends, and that it leaves nothing behind."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from pipemax.serve.limits import Timings
from pipemax.wire import ProcessIdentity
from pipemax_spark.errors import EngineSessionError
from pipemax_spark.executor.client import EngineOptions, complete
from pipemax_spark.executor.server_process import ServerFiles
from tests.serve.support import (
    FakeJvm,
    files_of,
    options,
    request_batch,
    run_prompts,
    server_of,
    server_stats,
    shut_down,
)
from tests.waiting import wait_until

EnginePython = Callable[..., str]
_REPOSITORY = Path(__file__).resolve().parents[2]
NEVER_S = 36_000.0
STACKS = "(most recent call first)"


def _server_and_child(opts: EngineOptions) -> tuple[ProcessIdentity, ProcessIdentity]:
    """The processes of the server, which is started if there is none, and of its engine."""
    run_prompts(["hello"], opts)
    wait_until(lambda: server_stats(opts).engine_metrics)
    return server_of(opts), ProcessIdentity.of(int(server_stats(opts).engine_metrics["child_pid"]))


def _assert_gone(files: ServerFiles, *processes: ProcessIdentity) -> float:
    took_s = wait_until(lambda: not any(p.is_running() for p in processes), what="server and child are gone")
    assert not files.socket.exists()
    assert not files.record.exists()
    return took_s


def test_the_server_ends_with_its_jvm_during_work(fake_engine_python: EnginePython, jvm: FakeJvm) -> None:
    opts = options(fake_engine_python(), child_process=True)
    results = complete([request_batch(["quick", "[[slow 600]] never"])], opts, task="task")
    next(results)
    server, child = _server_and_child(opts)
    files = files_of(opts)
    jvm.kill()
    with pytest.raises(EngineSessionError, match=r"the executor, pid .* is gone"):
        list(results)
    _assert_gone(files, server, child)


@pytest.mark.long  # it ends with its JVM during work, below
def test_the_server_ends_with_its_jvm_while_a_model_loads(
    fake_engine_python: EnginePython, jvm: FakeJvm
) -> None:
    opts = options(fake_engine_python(), load_s=600, start_timeout_s=30.0)
    with pytest.raises(EngineSessionError, match="no engine after"):
        run_prompts(["hello"], opts)
    server = server_of(opts)
    files = files_of(opts)
    jvm.kill()
    _assert_gone(files, server)


def test_processes_of_the_engine_end_with_a_killed_server(fake_engine_python: EnginePython) -> None:
    opts = options(fake_engine_python(), child_process=True)
    server, child = _server_and_child(opts)
    os.kill(server.pid, signal.SIGKILL)
    wait_until(lambda: not child.is_running())


def test_the_server_ends_a_while_after_its_last_daemon(
    fake_engine_python: EnginePython, jvm: FakeJvm
) -> None:
    assert Timings().daemons_grace_s == 5.0
    engine_python = fake_engine_python("--daemons-grace-s=3")
    client = [sys.executable, "-m", "tests.serve.client_process", engine_python, "10", "5", "task"]
    assert subprocess.run(client, cwd=_REPOSITORY, check=False).returncode == 0
    (server,) = jvm.servers()
    assert _assert_gone(files_of(options(engine_python)), server) > 0.5


def test_an_idle_server_ends_and_the_next_task_starts_another(fake_engine_python: EnginePython) -> None:
    opts = options(fake_engine_python("--idle-exit-s=0.3"), latency_s=0.4)
    run_prompts(["longer than the idle time"], opts)
    first = server_of(opts)
    _assert_gone(files_of(opts), first)
    run_prompts(["hello"], opts)
    assert server_of(opts) != first


@pytest.mark.long  # a variant
def test_a_task_that_comes_while_the_server_ends_waits_for_its_end(fake_engine_python: EnginePython) -> None:
    opts = options(fake_engine_python(), close_s=0.5)
    run_prompts(["hello"], opts)
    first = server_of(opts)
    shut_down(opts)
    assert first.is_running()
    run_prompts(["hello"], opts)
    assert not first.is_running()
    assert server_of(opts) != first


@pytest.mark.long  # as by SIGTERM, below
def test_an_engine_that_does_not_close_is_killed(fake_engine_python: EnginePython) -> None:
    opts = options(fake_engine_python("--close-timeout-s=0.5"), close_s=60, child_process=True)
    server, child = _server_and_child(opts)
    started_s = time.monotonic()
    shut_down(opts)
    _assert_gone(files_of(opts), server, child)
    assert time.monotonic() - started_s > 0.4


def test_sigterm_ends_the_server_in_order(fake_engine_python: EnginePython) -> None:
    opts = options(fake_engine_python(), child_process=True)
    server, child = _server_and_child(opts)
    os.kill(server.pid, signal.SIGTERM)
    _assert_gone(files_of(opts), server, child)
    log = files_of(opts).log.read_text()
    assert "the engine closed" in log
    assert STACKS not in log, "nothing had to be killed"


def test_sigterm_ends_a_server_whose_engine_never_closes(fake_engine_python: EnginePython) -> None:
    opts = options(fake_engine_python(), close_s=NEVER_S, child_process=True, child_ends_after_s=NEVER_S)
    server, child = _server_and_child(opts)
    os.kill(server.pid, signal.SIGTERM)
    took_s = _assert_gone(files_of(opts), server, child)
    assert took_s > 4.0, "the engine has 5 s to close"
    log = files_of(opts).log.read_text()
    assert "the engine DID NOT CLOSE after 5." in log
    assert " in close" in log[log.index(STACKS) :], "the log says what the engine's thread hung in"


@pytest.mark.long  # a variant
def test_sigterm_shortens_a_close_that_has_begun(fake_engine_python: EnginePython) -> None:
    assert Timings().close_timeout_s == 90.0
    opts = options(fake_engine_python(), close_s=NEVER_S, child_process=True, child_ends_after_s=NEVER_S)
    server, child = _server_and_child(opts)
    shut_down(opts)
    wait_until(lambda: "ending: told" in files_of(opts).log.read_text(), 120)
    os.kill(server.pid, signal.SIGTERM)
    _assert_gone(files_of(opts), server, child)
    assert "ending sooner: SIGTERM" in files_of(opts).log.read_text()


def test_the_server_is_detached_from_its_starter(fake_engine_python: EnginePython) -> None:
    opts = options(fake_engine_python())
    run_prompts(["hello"], opts)
    server = server_of(opts).pid
    parent = int(Path(f"/proc/{server}/stat").read_text().rpartition(")")[2].split()[1])
    assert parent != os.getpid()
    # What a terminal or Spark tells its tasks' group is not for the server.
    assert os.getpgid(server) == server
    # Linux may schedule by session: the server competes with the tasks as one of them.
    assert os.getsid(server) == os.getsid(0)
