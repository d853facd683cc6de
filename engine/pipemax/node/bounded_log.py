"""Keep a log within bounds that several processes write to.

The engine server's output, vLLM's processes' and that of any library in them go to one file, through descriptors that
they inherit and keep for life. So no logging handler can rotate it, and renaming it would change nothing. Instead the
server looks at the file's size now and then. When the file is too large, its last part is copied to ``PATH.1``, in
place of what was there, and the file is emptied. All writers append, so each goes on at the file's new end.

The two files together take at most three times the maximum, and what is written between two looks. What is written in
the instant between the copy and the emptying is lost. Lines that repeat are held back where they are logged:
``repeated_lines``.
"""

import contextlib
import logging
import os
import threading
from pathlib import Path

log = logging.getLogger(__name__)

_COPY_BYTES = 1 << 20


class BoundedLog:
    """A log file whose size is bounded. Its writers must have opened it to append (``O_APPEND``)."""

    def __init__(self, path: Path, *, max_bytes: int) -> None:
        self._path = path
        self._max_bytes = max_bytes

    @property
    def older(self) -> Path:
        """The file with what came before."""
        return self._path.with_name(f"{self._path.name}.1")

    def watch(self, *, period_s: float) -> None:
        """Look every ``period_s`` seconds, for this process's life, on a thread of its own."""
        threading.Thread(target=self._watch, args=(period_s,), name="log-size", daemon=True).start()

    def look(self) -> None:
        """Move the file's last ``max_bytes`` to the older file if it is larger, and drop what was before them."""
        with contextlib.suppress(FileNotFoundError), self._path.open("r+b") as file:
            size = os.fstat(file.fileno()).st_size
            if size <= self._max_bytes:
                return
            file.seek(size - self._max_bytes)
            num_left = 2 * self._max_bytes  # not endless, should a writer be faster than the copy
            try:
                with self.older.open("wb") as older:
                    while num_left > 0 and (part := file.read(min(num_left, _COPY_BYTES))):
                        num_left -= older.write(part)
            except OSError:
                # A full disk: the old part is given up, for the engine needs the space more.
                self.older.unlink(missing_ok=True)
            file.truncate(0)

    def _watch(self, period_s: float) -> None:
        forever = threading.Event()
        while True:
            try:
                self.look()
            except OSError:
                log.warning("the size of the log %s could not be bounded", self._path, exc_info=True)
            forever.wait(period_s)
