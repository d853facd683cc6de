"""Decide when the server ends: its executor, Python daemons or socket are gone, it idles, or it is told to end.

Processes are watched by pidfd, which a reused pid cannot deceive and which also fires for a zombie. This module only
decides; ``main`` takes the server down.
"""

import logging
import os
import queue
import select
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from pipemax.serve.limits import Timings
from pipemax.wire import ProcessIdentity

log = logging.getLogger(__name__)

_LOOK_PERIOD_S = 0.25
HURRIED_CLOSE_S = 8.0
"""Used when no client is left. vLLM gives its workers 5 s; shared memory leaks if it cannot finish."""
EXIT_ENGINE_DIED = 3
"""The server's exit status when its engine has died."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exit:
    """The reason why the server ends."""

    reason: str
    status: int = 0
    close_within_s: float | None = None
    """How long the engine may take to close; None for its full time."""


def has_ended(pidfd: int, *, timeout_s: float) -> bool:
    """Tell whether the process ends within the time."""
    poll = select.poll()  # not select(), which fails on descriptors above 1023
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(timeout_s * 1000))


class WatchedProcess:
    """One process, watched by pidfd where the kernel has it (Linux 5.3), otherwise by looking at /proc."""

    def __init__(self, identity: ProcessIdentity) -> None:
        self.identity = identity
        self._fd: int | None = None
        try:
            self._fd = os.pidfd_open(identity.pid)
        except ProcessLookupError:
            return
        except OSError as error:
            log.warning("no pidfd for pid %d, looking at /proc instead: %s", identity.pid, error)
            return
        if (
            not identity.is_running()
        ):  # the pid may have belonged to another process by the time it was opened
            self.close()

    def fileno(self) -> int | None:
        return self._fd

    def is_gone(self) -> bool:
        if self._fd is None:
            return not self.identity.is_running()
        return has_ended(self._fd, timeout_s=0.0)

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


class Lifecycle:
    """Decides when the server ends. Thread-safe."""

    def __init__(self, executor: ProcessIdentity, timings: Timings, *, socket: Path) -> None:
        self._timings = timings
        self._socket = socket
        self._executor = WatchedProcess(executor)
        self._lock = threading.Lock()
        self._daemons: dict[ProcessIdentity, WatchedProcess] = {}
        self._had_daemons = False
        self._alone_since_s: float | None = None
        self._open_sessions = 0
        self._idle_since_s = time.monotonic()
        # Of this kind, for a signal's handler may interrupt ``wait`` anywhere and put its cause in.
        self._exits: queue.SimpleQueue[Exit] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._watch, name="lifecycle", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def open_session(self, daemon: ProcessIdentity) -> None:
        with self._lock:
            self._open_sessions += 1
            if daemon not in self._daemons:
                self._daemons[daemon] = WatchedProcess(daemon)
                self._had_daemons = True

    def close_session(self) -> None:
        with self._lock:
            self._open_sessions -= 1
            self._idle_since_s = time.monotonic()

    def stop(self, cause: Exit) -> None:
        """End the server. The first cause counts; a later one may only leave the engine less time."""
        self._exits.put(cause)

    def wait(self) -> Exit:
        """Block until the server is to end. Wakes up now and then, so that signal handlers run."""
        while True:
            try:
                return self._exits.get(timeout=1.0)
            except queue.Empty:
                continue

    def later_cause(self) -> Exit | None:
        """Return a cause that came after the one that ``wait`` returned, each once; None if there is no further one."""
        try:
            return self._exits.get_nowait()
        except queue.Empty:
            return None

    def _watch(self) -> None:
        while True:
            cause = self._look()
            if cause is not None:
                self.stop(cause)
                return
            self._sleep_until_executor_ends(_LOOK_PERIOD_S)

    def _sleep_until_executor_ends(self, timeout_s: float) -> None:
        fd = self._executor.fileno()
        if fd is None:
            time.sleep(timeout_s)
        else:
            has_ended(fd, timeout_s=timeout_s)

    def _look(self) -> Exit | None:
        now_s = time.monotonic()
        if self._executor.is_gone():
            return Exit(
                reason=f"the executor, pid {self._executor.identity.pid}, is gone",
                close_within_s=HURRIED_CLOSE_S,
            )
        if not self._socket.exists():
            # No new task can find this server, and it would keep the GPUs from the server that is started instead.
            return Exit(reason=f"its socket {self._socket} was deleted")
        with self._lock:
            for identity in [i for i, daemon in self._daemons.items() if daemon.is_gone()]:
                self._daemons.pop(identity).close()
            if self._daemons or not self._had_daemons:
                self._alone_since_s = None
            elif self._alone_since_s is None:
                self._alone_since_s = now_s
            elif now_s - self._alone_since_s >= self._timings.daemons_grace_s:
                return Exit(reason="all Python daemons that used it are gone", close_within_s=HURRIED_CLOSE_S)
            if self._open_sessions == 0 and now_s - self._idle_since_s >= self._timings.idle_exit_s:
                return Exit(reason=f"no session for {self._timings.idle_exit_s:.0f} s")
        return None
