"""One lock per GPU, so that a successor's engine loads only where nobody of an earlier engine is left.

Two flocks stand for a GPU, in the directory of the servers' sockets. ``.lock`` is the server's, from before its
engine loads to its end. ``.users`` is shared by the engine's own processes, which vLLM spawns and which inherit no
descriptor: each takes it by itself before it touches the GPU (``pipemax.node.lifetime``). So whoever holds the one and
finds the other free knows that the memory is: a killed server's workers can outlive it, and do for as long as the
kernel takes to give their memory back. The kernel releases both, however a process ends.

It sees the servers of this user on this machine (in a container, of this container); machines without NVIDIA's
driver have no locks.
"""

import fcntl
import logging
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from pipemax.node.lifetime import GPU_USERS_VARIABLE

log = logging.getLogger(__name__)

_RETRY_S = 0.1


class GpuLocks:
    """The GPUs of this server. ``take`` on the engine's thread, ``wait_reason`` on any."""

    def __init__(self, directory: Path, gpus: Sequence[str]) -> None:
        """Makes the files in ``directory``; ``gpus`` as from ``pipemax.node.gpus``."""
        if gpus:
            directory.mkdir(mode=0o700, exist_ok=True)
        # Every server takes them in the same order: two of overlapping sets never wait for each other.
        self._locks = {gpu: directory / f"{_file_name(gpu)}.lock" for gpu in sorted(gpus)}
        self._held: dict[str, int] = {}
        self._wait_reason = ""

    @property
    def environment(self) -> dict[str, str]:
        """For the engine's processes, which hold the GPUs by what it says."""
        users = [str(lock.with_suffix(".users")) for lock in self._locks.values()]
        return {GPU_USERS_VARIABLE: os.pathsep.join(users)} if users else {}

    @property
    def wait_reason(self) -> str:
        """Whom ``take`` waits for; empty when it does not."""
        return self._wait_reason

    def take(self, *, gives_up: Callable[[], bool]) -> bool:
        """Wait until the GPUs are this server's alone, and keep them to its end. False when ``gives_up`` did."""
        try:
            return all(self._take_gpu(gpu, lock, gives_up) for gpu, lock in self._locks.items())
        finally:
            self._wait_reason = ""

    def _take_gpu(self, gpu: str, lock: Path, gives_up: Callable[[], bool]) -> bool:
        if gpu in self._held:
            return True
        held = _wait_for(lock, lambda: self._note_wait(gpu, lock), gives_up)
        if held is None:
            return False
        users = lock.with_suffix(".users")
        # The lock alone says that the server has ended, not that its engine's processes have.
        unused = _wait_for(users, lambda: self._note_wait(gpu, users), gives_up)
        if unused is None:
            os.close(held)
            return False
        os.close(unused)
        self._held[gpu] = held
        return True

    def _note_wait(self, gpu: str, file: Path) -> None:
        reason = f"waiting for GPU {gpu}, which {_describe_holders(file)} still holds"
        if reason != self._wait_reason:
            log.warning("%s", reason)
            self._wait_reason = reason


def _wait_for(file: Path, note_wait: Callable[[], None], gives_up: Callable[[], bool]) -> int | None:
    """A descriptor that locks the file; None when the caller gave up. Polled, for the caller may give up."""
    fd = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    while not gives_up():
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return fd
        except BlockingIOError:
            note_wait()
        time.sleep(_RETRY_S)
    os.close(fd)
    return None


def _describe_holders(file: Path) -> str:
    """Who holds the file's lock, for people."""
    # Lines such as "1: FLOCK  ADVISORY  WRITE 1226 fe:00:9980997 0 EOF"; a waiting one has "->" after its number.
    inode = str(file.stat().st_ino)
    holders = []
    for line in Path("/proc/locks").read_text().splitlines():
        match line.split():
            case [_, "FLOCK", _, _, pid, place, *_] if place.rpartition(":")[2] == inode:
                holders.append(f"process {pid} ({_command(pid)})")
    return " and ".join(holders) or "another process"


def _command(pid: str) -> str:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return "ended, but not a process that it forked"
    return " ".join(words)[:200].strip() or "ending"


def _file_name(gpu: str) -> str:
    return "".join(char if char.isalnum() else "-" for char in gpu)
