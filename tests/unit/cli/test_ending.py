"""SIGTERM ends a command with its engine, whether the engine closes or not."""

import signal
import subprocess
import sys
import time

import pytest

from pipemax.wire import ProcessIdentity

COMMAND = """
import subprocess, sys, time
from types import SimpleNamespace
closes = sys.argv[1] == "closes"

def hold_an_engine(*_, **__):
    try:
        sleep = [sys.executable, "-c", "import time; time.sleep(36_000)"]
        process = subprocess.Popen(sleep, start_new_session=True, stdout=subprocess.DEVNULL)
        print(process.pid, flush=True)
        time.sleep(36_000)
    finally:
        if not closes:
            time.sleep(36_000)
        process.kill()
        process.wait()
        print("closed", flush=True)

# In place of the modules that import vLLM.
sys.modules["pipemax.vllm_ext.node_check.node"] = SimpleNamespace(check_this_node=hold_an_engine)
from pipemax.cli.app import app
app(["check-node", "--model", "m"])
"""


# One that never closes takes its 5 s; tests/serve/test_life has it of a server.
@pytest.mark.parametrize("engine", ["closes", pytest.param("never closes", marks=pytest.mark.long)])
def test_sigterm_ends_the_engine_s_processes_with_the_command(engine: str) -> None:
    running = subprocess.Popen(
        [sys.executable, "-c", COMMAND, engine],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert running.stdout is not None
    process = ProcessIdentity.of(int(running.stdout.readline()))
    told_s = time.monotonic()
    running.terminate()
    output, errors = running.communicate(timeout=60)
    assert running.returncode == 128 + signal.SIGTERM
    assert not process.is_running()
    if engine == "closes":
        assert (output, errors) == ("closed\n", "")
    else:
        assert time.monotonic() - told_s > 4.0, "the engine has 5 s to close"
        assert "did not close within 5 s" in errors
        assert "in hold_an_engine" in errors, "the stacks say what hangs"
