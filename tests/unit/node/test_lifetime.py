"""A child of the engine server ends when the server does."""

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pipemax.node.lifetime import GPU_USERS_VARIABLE, SERVER_IDENTITY_VARIABLE
from pipemax.node.repeated_lines import MAX_LINES
from pipemax.wire import ProcessIdentity

CHILD = "from pipemax.node.lifetime import end_with_server; end_with_server(); end_with_server(); input('ready\\n')"


def start_child(server: ProcessIdentity, **variables: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", CHILD],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, SERVER_IDENTITY_VARIABLE: f"{server.pid}:{server.start_ticks}", **variables},
    )


def test_a_child_ends_when_the_server_is_killed() -> None:
    server = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    child = start_child(ProcessIdentity.of(server.pid))
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    server.kill()
    server.wait()
    assert child.wait(timeout=60) == 1


def test_a_child_holds_back_the_lines_that_it_repeats() -> None:
    script = """
import logging
logging.getLogger("vllm").addHandler(logging.StreamHandler())  # as vLLM does before it loads the plugin
from pipemax.node.lifetime import end_with_server
end_with_server()
for _ in range(1000): logging.getLogger("vllm.worker").warning("again")
"""
    own = ProcessIdentity.of_this_process()
    environment = {**os.environ, SERVER_IDENTITY_VARIABLE: f"{own.pid}:{own.start_ticks}"}
    child = subprocess.run([sys.executable, "-c", script], env=environment, stderr=subprocess.PIPE, text=True)
    assert child.stderr.count("again") == MAX_LINES


def test_a_child_ends_at_once_when_the_server_is_gone_already() -> None:
    gone = ProcessIdentity(pid=os.getpid(), start_ticks=1)
    assert start_child(gone).wait(timeout=60) == 1


def test_a_child_holds_the_server_s_gpus_until_it_ends(tmp_path: Path) -> None:
    users = [tmp_path / "0.users", tmp_path / "1.users"]
    server = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    variables = {GPU_USERS_VARIABLE: ":".join(map(str, users))}
    children = [start_child(ProcessIdentity.of(server.pid), **variables) for _ in range(2)]
    for child in children:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
    for path in users:
        with path.open() as file, pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    server.kill()
    server.wait()
    for child in children:
        child.wait(timeout=60)
    for path in users:
        with path.open() as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_outside_a_server_nothing_happens() -> None:
    environment = {name: value for name, value in os.environ.items() if name != SERVER_IDENTITY_VARIABLE}
    child = subprocess.run(
        [sys.executable, "-c", CHILD],
        input="go\n",
        text=True,
        env=environment,
        capture_output=True,
        timeout=30,
    )
    assert child.returncode == 0, child.stderr


def test_vllm_finds_the_plugin() -> None:
    from importlib.metadata import entry_points

    (plugin,) = entry_points(group="vllm.general_plugins", name="pipemax_lifetime")
    assert plugin.load().__module__ == "pipemax.node.lifetime"
