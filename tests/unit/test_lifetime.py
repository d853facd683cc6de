"""A child of the engine server ends when the server does."""

import os
import subprocess
import sys

from pipemax.lifetime import SERVER_IDENTITY_VARIABLE
from pipemax.wire import ProcessIdentity

CHILD = (
    "from pipemax.lifetime import end_with_server; end_with_server(); end_with_server(); input('ready\\n')"
)


def start_child(server: ProcessIdentity) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", CHILD],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, SERVER_IDENTITY_VARIABLE: f"{server.pid}:{server.start_ticks}"},
    )


def test_a_child_ends_when_the_server_is_killed() -> None:
    server = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    child = start_child(ProcessIdentity.of(server.pid))
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    server.kill()
    server.wait()
    assert child.wait(timeout=10) == 1


def test_a_child_ends_at_once_when_the_server_is_gone_already() -> None:
    gone = ProcessIdentity(pid=os.getpid(), start_ticks=1)
    assert start_child(gone).wait(timeout=10) == 1


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
    assert plugin.load().__module__ == "pipemax.lifetime"
