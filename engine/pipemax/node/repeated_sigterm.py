"""Send SIGTERM again to processes that have not acted on the first one, and in the end SIGKILL.

On an H100, three of nine engines whose main thread waited for input did nothing on vLLM's SIGTERM, and ended at once on
a second one. A process that acts on it stops catching the signal before it takes down its engine, as vLLM's core does;
from then on another one would kill it in the midst of that, so it gets none. An engine of another run heard none of 26.
"""

import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from pipemax.node.process import ProcessIdentity

AGAIN_AFTER_S = 3.0
_MOST_TIMES = 5
"""A process that still catches SIGTERM after so many more has not begun to end, and is killed."""


@contextmanager
def sigterm_repeated(pids: Sequence[int], *, every_s: float = AGAIN_AFTER_S) -> Iterator[None]:
    """While the block runs, send SIGTERM every so often to the processes that still catch it; in the end kill them."""
    known = []
    for pid in pids:
        with suppress(ProcessLookupError):
            known.append(ProcessIdentity.of(pid))
    is_over = threading.Event()

    def repeat() -> None:
        times = 0
        while not is_over.wait(every_s):
            times += 1
            for process in known:
                if catches_sigterm(process.pid):
                    process.send(signal.SIGTERM if times <= _MOST_TIMES else signal.SIGKILL)

    thread = threading.Thread(target=repeat, name="sigterm-again", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def catches_sigterm(pid: int) -> bool:
    """Return whether a process has a handler for SIGTERM, by /proc/PID/status."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    except (FileNotFoundError, ProcessLookupError):
        return False
    caught = next((line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:")), "0")
    return bool(int(caught, 16) >> (signal.SIGTERM - 1) & 1)
