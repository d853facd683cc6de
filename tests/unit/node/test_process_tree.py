"""All processes below one are killed, wherever they are, and no others."""

import subprocess
import sys

from pipemax.wire import ProcessIdentity

SLEEP = "import os, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(36_000)"
PARENT = f"""
import subprocess, sys
from pipemax.node.process_tree import kill_engine_processes
own = [sys.executable, "-c"]
# In a session of its own, with a child of its own, neither of which ends by itself.
below = [*own, "import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', sys.argv[1]]).pid, flush=True);"
         + "exec(sys.argv[1])", {SLEEP!r}]
child = subprocess.Popen(below, stdout=subprocess.PIPE, text=True, start_new_session=True)
print(child.pid, child.stdout.readline(), flush=True)
print("left:", kill_engine_processes())
"""


def test_processes_below_are_killed_with_their_own_and_no_others() -> None:
    other = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    parent = subprocess.run([sys.executable, "-c", PARENT], capture_output=True, text=True, check=True)
    first, _, left = parent.stdout.partition("left: ")
    assert left == "[]\n"
    child, grandchild = (int(pid) for pid in first.split())
    for pid in (child, grandchild):
        assert not _runs(pid)
    assert "in kill_engine_processes" in parent.stderr, "its own stacks are in the log"
    assert other.poll() is None
    other.communicate(b"\n")


def _runs(pid: int) -> bool:
    try:
        return ProcessIdentity.of(pid).is_running()
    except ProcessLookupError:
        return False
