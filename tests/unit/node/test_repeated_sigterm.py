"""A process that misses the first SIGTERM gets more, and is killed; one that has begun to end gets none."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from pipemax.node.repeated_sigterm import catches_sigterm, sigterm_repeated

ENDS_ON_THE_SECOND = """
import os, signal
told = []
signal.signal(signal.SIGTERM, lambda *_: told.append(0) if not told else os._exit(7))
print("ready", flush=True)
while True:
    signal.pause()
"""
HEARS_NOTHING = """
import signal
signal.signal(signal.SIGTERM, lambda *_: None)
print("ready", flush=True)
while True:
    signal.pause()
"""
ENDS_SLOWLY = """
import signal, sys, time
def end(*_):
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    print("ending", flush=True)
    time.sleep(1.0)
    sys.exit(7)
signal.signal(signal.SIGTERM, end)
print("ready", flush=True)
while True:
    signal.pause()
"""


@pytest.fixture
def process(request: pytest.FixtureRequest) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen([sys.executable, "-c", request.param], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        yield child
        child.kill()


@pytest.mark.parametrize("process", [ENDS_ON_THE_SECOND], indirect=True)
def test_a_process_that_does_nothing_on_sigterm_is_told_again(process: subprocess.Popen[str]) -> None:
    with sigterm_repeated([process.pid], every_s=0.05):
        os.kill(process.pid, signal.SIGTERM)
        assert process.wait(timeout=60) == 7


@pytest.mark.parametrize("process", [HEARS_NOTHING], indirect=True)
def test_a_process_that_never_acts_on_sigterm_is_killed(process: subprocess.Popen[str]) -> None:
    with sigterm_repeated([process.pid], every_s=0.05):
        os.kill(process.pid, signal.SIGTERM)
        assert process.wait(timeout=60) == -signal.SIGKILL


@pytest.mark.parametrize("process", [ENDS_SLOWLY], indirect=True)
def test_a_process_that_has_begun_to_end_is_left_alone(process: subprocess.Popen[str]) -> None:
    os.kill(process.pid, signal.SIGTERM)
    assert process.stdout is not None
    assert process.stdout.readline() == "ending\n"
    assert not catches_sigterm(process.pid)
    with sigterm_repeated([process.pid], every_s=0.05):
        assert process.wait(timeout=60) == 7, "another SIGTERM would have killed it"


def test_a_process_that_has_ended_is_no_error() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait(timeout=60)
    with sigterm_repeated([child.pid], every_s=0.01):
        assert not catches_sigterm(child.pid)
