"""The fake engine's process: it watches the server and holds its GPUs as vLLM's processes do."""

import subprocess
import sys
from pathlib import Path

from tests.fakes.settings import FakeOptions

_CHILD = """
import os, select, sys, time
sys.path.insert(0, sys.argv[1])
from pipemax.node.lifetime import hold_gpus
hold_gpus()
pid = int(os.environ["PIPEMAX_SERVER_IDENTITY"].partition(":")[0])
poll = select.poll()
poll.register(os.pidfd_open(pid), select.POLLIN)
print("ready", flush=True)
poll.poll()
time.sleep(float(sys.argv[2]))
"""


def start_child(options: FakeOptions) -> subprocess.Popen[bytes]:
    engine = Path(__file__).resolve().parents[2] / "engine"
    child = subprocess.Popen(
        [sys.executable, "-I", "-c", _CHILD, str(engine), str(options.child_ends_after_s)],
        stdout=subprocess.PIPE,
        # In a session of its own: killing the server's process group must not be what ends it.
        start_new_session=True,
    )
    assert child.stdout is not None
    child.stdout.readline()
    return child
