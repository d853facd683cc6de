"""Lock each GPU, so that a successor's engine loads only when no process of an earlier engine is left.

Each GPU has two flocks, in the directory of the servers' sockets. The server holds ``.lock`` from before its engine
loads until the server ends. The engine's own processes share ``.users``. vLLM spawns them and they inherit no
descriptor, so each takes the lock by itself before it touches the GPU (``pipemax.node.lifetime``). A server that holds
``.lock`` and finds ``.users`` free therefore knows that the GPU's memory is free: a killed server's workers can
outlive it, and do for as long as the kernel takes to free their memory. The kernel releases both locks, however a
process ends.

The locks cover the servers of this user on this machine (in a container, of this container). Machines without
NVIDIA's driver have no locks.
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
    """The locks of this server's GPUs. Call ``take`` on the engine's thread; read ``wait_reason`` on any."""

    def __init__(self, directory: Path, gpus: Sequence[str]) -> None:
        """Make ``directory`` for the lock files; ``gpus`` are as from ``pipemax.node.gpus``."""
        if gpus:
            directory.mkdir(mode=0o700, exist_ok=True)
        # Every server takes its locks in the same order: two servers that share GPUs never wait for each other.
        self._locks = {gpu: directory / f"{_file_name(gpu)}.lock" for gpu in sorted(gpus)}
        self._held: dict[str, int] = {}
        self._wait_reason = ""

    @property
    def gpus(self) -> tuple[str, ...]:
        """The GPUs of this server."""
        return tuple(self._locks)

    @property
    def environment(self) -> dict[str, str]:
        """The variables that tell the engine's processes which ``.users`` files to lock."""
        users = [str(lock.with_suffix(".users")) for lock in self._locks.values()]
        return {GPU_USERS_VARIABLE: os.pathsep.join(users)} if users else {}

    @property
    def wait_reason(self) -> str:
        """The process that ``take`` waits for, in words; empty when it does not wait."""
        return self._wait_reason

    def take(self, *, gives_up: Callable[[], bool]) -> bool:
        """Wait until only this server has the GPUs, and keep them until it ends. ``False`` if ``gives_up`` did."""
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
        # The lock says only that the server has ended, not that its engine's processes have.
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
    """Poll until the file is locked. Return the descriptor that locks it, or ``None`` if the caller gave up."""
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
    """Describe the holder of the file's lock, for people."""
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
