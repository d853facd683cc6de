"""Looks at this machine's processes: which engine servers run, and whether one still does."""

import contextlib
import time
from collections.abc import Callable
from pathlib import Path

from pipemax.wire import ProcessIdentity


def servers_of(mark: str | Path) -> set[ProcessIdentity]:
    """The engine servers with this in their command line: their ``engine_python``, or their log directory."""
    found = set()
    for cmdline in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            command = cmdline.read_bytes()
            if str(mark).encode() in command and b"\0pipemax.serve\0" in command:
                found.add(ProcessIdentity.of(int(cmdline.parent.name)))
    return found


def wait_until(condition: Callable[[], bool], within_s: float, what: str) -> None:
    deadline_s = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline_s, f"not within {within_s} s: {what}"
        time.sleep(0.05)
