import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pipemax.wire import ProcessIdentity, pid_namespace
from pipemax_spark.errors import EngineSessionError
from pipemax_spark.executor.server_process import Executor, ServerFiles, ensure_server


@contextmanager
def _executor() -> Iterator[Executor]:
    """Of a process that ends with the block."""
    with subprocess.Popen(["sleep", "600"]) as process:
        identity = ProcessIdentity.of(process.pid)
        try:
            yield Executor(process=identity, daemon=identity)
        finally:
            process.kill()


def _start_in_vain(directory: Path, name: str) -> ServerFiles:
    """The files of an executor that is dead by now, and whose server never started; sweeps the directory."""
    files = ServerFiles(socket=directory / f"{name}.sock", log=directory / f"{name}.log")
    with _executor() as executor, pytest.raises(EngineSessionError):
        ensure_server(files, executor, "/bin/false", deadline_s=time.monotonic() + 10)
    return files


def test_what_a_dead_executor_left_is_removed_at_the_next_start(tmp_path: Path) -> None:
    dead = _start_in_vain(tmp_path, "dead")

    _start_in_vain(tmp_path, "next")

    assert not dead.lock.exists()


def test_what_an_executor_of_another_pid_namespace_left_stays(tmp_path: Path) -> None:
    other = _start_in_vain(tmp_path, "other")
    # Another container's, which shares this directory: its processes have no pid here, and may live.
    namespace = str(pid_namespace())
    other.lock.write_text(other.lock.read_text().replace(namespace, "pid:[1]"))
    other.socket.touch()

    _start_in_vain(tmp_path, "next")

    assert other.lock.exists()
    assert other.socket.exists()


def test_a_lock_without_a_pid_namespace_is_kept(tmp_path: Path) -> None:
    older = tmp_path / "older.lock"
    older.write_text("[4194304, 1]")  # as an earlier version wrote it

    _start_in_vain(tmp_path, "next")

    assert older.exists()
