"""Decide when the server ends: its executor, Python daemons or socket are gone, it idles, or it is told to end.

It looks a few times a second. This module only decides; ``main`` takes the server down.
"""

import logging
import queue
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


class Lifecycle:
    """Decides when the server ends. Thread-safe."""

    def __init__(self, executor: ProcessIdentity, timings: Timings, *, socket: Path) -> None:
        self._timings = timings
        self._socket = socket
        self._executor = executor
        self._lock = threading.Lock()
        self._daemons: set[ProcessIdentity] = set()  # those that still run
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
            self._daemons.add(daemon)
            self._had_daemons = True

    def close_session(self) -> None:
        with self._lock:
            self._open_sessions -= 1
            self._idle_since_s = time.monotonic()

    @property
    def num_open_sessions(self) -> int:
        """The sessions that are served, or whose job's last report is under way."""
        with self._lock:
            return self._open_sessions

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
            try:
                cause = self._look()
            except OSError as error:  # too many open files, for instance: the next look may succeed
                log.warning("/proc cannot be read: %s", error)
                cause = None
            if cause is not None:
                self.stop(cause)
                return
            time.sleep(_LOOK_PERIOD_S)

    def _look(self) -> Exit | None:
        now_s = time.monotonic()
        if not self._executor.is_running():
            return Exit(
                reason=f"the executor, pid {self._executor.pid}, is gone", close_within_s=HURRIED_CLOSE_S
            )
        if not self._socket.exists():
            # No new task can find this server, and it would keep the GPUs from the server that is started instead.
            return Exit(reason=f"its socket {self._socket} was deleted")
        with self._lock:
            self._daemons = {daemon for daemon in self._daemons if daemon.is_running()}
            if self._daemons or not self._had_daemons:
                self._alone_since_s = None
            elif self._alone_since_s is None:
                self._alone_since_s = now_s
            elif now_s - self._alone_since_s >= self._timings.daemons_grace_s:
                return Exit(reason="all Python daemons that used it are gone", close_within_s=HURRIED_CLOSE_S)
            if self._open_sessions == 0 and now_s - self._idle_since_s >= self._timings.idle_exit_s:
                return Exit(reason=f"no session for {self._timings.idle_exit_s:.0f} s")
        return None
