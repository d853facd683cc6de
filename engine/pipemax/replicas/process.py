"""Start and end the process of a replica, and carry its messages.

Threads of its own read, write and wait for its end, so that a replica that hangs holds up nobody. What it says arrives
as ``Heard`` in the queue of events; ``Gone`` is the last, and comes once no process of the replica is left, so that its
GPU memory is free.
"""

import logging
import os
import queue
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Union

from pipemax.node.lifetime import SERVER_IDENTITY_VARIABLE
from pipemax.node.process import ProcessIdentity, running_in_group
from pipemax.replicas.division import Share
from pipemax.replicas.messages import Message, Start, ToReplica, line_of, lines_of, read_line

log = logging.getLogger(__name__)

_OMP_BIND_VARIABLE = "VLLM_CPU_OMP_THREADS_BIND"
_GROUP_ENDS_S = 60.0
"""How long the killed processes of a replica may take to give back their memory, before a next one is started."""
_LOOK_S = 0.02


@dataclass(frozen=True, slots=True)
class Heard:
    """A message of a replica."""

    process: "ReplicaProcess"
    message: Message


@dataclass(frozen=True, slots=True)
class Silenced:
    """A replica has ended: it says nothing more, and all that it said has been heard."""

    process: "ReplicaProcess"
    reason: str


@dataclass(frozen=True, slots=True)
class Gone:
    """No process of a replica is left."""

    process: "ReplicaProcess"


Event = Union[Heard, Silenced, Gone]  # noqa: UP007  # names of classes in quotes
Events = queue.SimpleQueue[Event]


class ReplicaProcess:
    """One life of a replica."""

    def __init__(
        self, number: int, share: Share, command: Sequence[str], events: Events, *, others_wait: bool = False
    ) -> None:
        """Start the process; it begins to load its engine. With ``others_wait`` it says whether they need to."""
        self.number = number
        self._events = events
        self._lines: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._connection, theirs = socket.socketpair()
        with theirs:
            # A group of its own, so that all of its processes can be killed at once.
            self._process = subprocess.Popen(
                [*command, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                process_group=0,
                env=_environment(share),
            )
        self.pid = self._process.pid
        config = share.config.model_dump(mode="json")
        self.send(
            Start(number=number, config=config, cores=share.cores, asks_whether_it_measures=others_wait)
        )
        self._reader = threading.Thread(target=self._read, name=f"replica-{number}-reader", daemon=True)
        self._waiter = threading.Thread(target=self._wait, name=f"replica-{number}-waiter", daemon=True)
        for thread in (self._reader, self._waiter):
            thread.start()
        threading.Thread(target=self._write, name=f"replica-{number}-writer", daemon=True).start()

    def send(self, message: ToReplica) -> None:
        """Queue a message. What a replica that has ended is sent is lost."""
        self._lines.put(line_of(message))

    def kill(self) -> None:
        """Kill all of its processes."""
        if self._process.returncode is None:
            with suppress(ProcessLookupError):  # it has just been reaped
                os.killpg(self.pid, signal.SIGKILL)

    def wait(self, timeout_s: float) -> bool:
        """Wait until none of its processes is left. Return ``False`` if that takes longer."""
        self._waiter.join(timeout_s)
        return not self._waiter.is_alive()

    def _read(self) -> None:
        for line in lines_of(self._connection):
            self._events.put(Heard(self, read_line(line)))

    def _write(self) -> None:
        while (line := self._lines.get()) is not None:
            try:
                self._connection.sendall(line)
            except OSError:
                return

    def _wait(self) -> None:
        # Not reaped yet: its group keeps the number, and no other process is killed for it.
        os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        os.killpg(self.pid, signal.SIGKILL)
        # Before the group has ended another process may hold the other end of the connection.
        deadline_s = time.monotonic() + _GROUP_ENDS_S
        silenced = False
        while (left := running_in_group(self.pid)) and time.monotonic() < deadline_s:
            silenced = silenced or self._tell_silenced(0.0)
            time.sleep(_LOOK_S)
        if left:
            log.error("processes %s of replica %d do not end", left, self.number)
        if not silenced:
            self._tell_silenced(None)
        self._process.wait()
        self._lines.put(None)
        self._connection.close()
        self._events.put(Gone(self))

    def _tell_silenced(self, timeout_s: float | None) -> bool:
        """Tell of the end once all has been read; return ``False`` if that was not within the time."""
        self._reader.join(timeout_s)
        if self._reader.is_alive():
            return False
        self._events.put(Silenced(self, _how_it_ended(self._process.pid)))
        return True


def _how_it_ended(pid: int) -> str:
    result = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert result is not None
    if result.si_code == os.CLD_EXITED:
        return f"its process {pid} ended with status {result.si_status}"
    return f"its process {pid} was killed by {signal.Signals(result.si_status).name}"


def _environment(share: Share) -> dict[str, str]:
    """Return the environment of a replica. This process is the one that it ends with."""
    environ = {**os.environ, SERVER_IDENTITY_VARIABLE: str(ProcessIdentity.of_this_process())}
    if share.gpus:
        environ["CUDA_VISIBLE_DEVICES"] = ",".join(share.gpus)
    # It speaks of the cores of one engine over the whole machine.
    environ.pop(_OMP_BIND_VARIABLE, None)
    return environ
