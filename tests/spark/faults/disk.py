"""A file system of its own for the work directories, small enough to be full for a while."""

import contextlib
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path


class SmallDisk:
    """With it, ``directory`` is a file system of so many MiB, where one can be mounted (``is_mounted``)."""

    def __init__(self, directory: Path, *, mib: int) -> None:
        self.directory = directory
        self.is_mounted = False
        self._changed = threading.Condition()
        self._num_users = 0
        """Of those for whom it must not be full now."""
        self._is_full = False
        self._mib = mib

    @contextlib.contextmanager
    def mounted(self) -> Iterator[None]:
        self.directory.mkdir(parents=True, exist_ok=True)
        command = ["mount", "-t", "tmpfs", "-o", f"size={self._mib}m", "tmpfs", str(self.directory)]
        self.is_mounted = subprocess.run(command, capture_output=True, check=False).returncode == 0
        try:
            yield
        finally:
            if self.is_mounted:
                subprocess.run(["umount", "--lazy", str(self.directory)], check=True)

    def fill(self) -> None:
        with self._filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(b"x" * 4_096)

    def free(self) -> None:
        self._filler.unlink()

    @contextlib.contextmanager
    def kept_free(self) -> Iterator[None]:
        """Within the context the disk is not full."""
        with self._changed:
            self._changed.wait_for(lambda: not self._is_full)
            self._num_users += 1
        try:
            yield
        finally:
            with self._changed:
                self._num_users -= 1
                self._changed.notify_all()

    def be_full(self, seconds: float) -> float:
        """Be full for so long, once nobody keeps it free; return since when, by the monotonic clock."""
        with self._changed:
            self._changed.wait_for(lambda: not self._num_users and not self._is_full)
            self._is_full = True
        since_s = time.monotonic()
        self.fill()
        time.sleep(seconds)
        self.free()
        with self._changed:
            self._is_full = False
            self._changed.notify_all()
        return since_s

    @property
    def _filler(self) -> Path:
        return self.directory / "filler"
