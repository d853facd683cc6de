"""Write to standard output or standard error, and drop what cannot be written: a job does not end for its report.

The reader may have gone (``| head -1``), the disk of a redirected output may be full, or the stream may be closed.
"""

import contextlib
import io
import logging
import os
import sys
from typing import IO, cast

log = logging.getLogger(__name__)


class LossyStream(io.TextIOBase):
    """The process's standard output, or its standard error, as ``sys`` has it at the moment of each write."""

    def __init__(self, name: str) -> None:
        """Take ``stdout`` or ``stderr``."""
        super().__init__()
        self._name = name
        self._has_told = False

    @property
    def _stream(self) -> IO[str] | None:
        stream: IO[str] | None = getattr(sys, self._name)  # None if the process began without it
        # While rich shows a line in place, it puts itself before the stream and writes to this one.
        proxied: IO[str] | None = getattr(stream, "rich_proxied_file", stream)
        return proxied

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """The stream's encoding, which rich asks for."""
        return getattr(self._stream, "encoding", None) or "utf-8"

    def write(self, text: str) -> int:
        """Write the text, or drop it. Characters that the stream cannot encode become question marks."""
        stream = self._stream
        if stream is None:
            return len(text)
        try:
            try:
                stream.write(text)
            except UnicodeEncodeError:
                stream.write(text.encode(self.encoding, "replace").decode(self.encoding))
        except (OSError, ValueError) as error:
            self._tell(error)
        return len(text)

    def flush(self) -> None:
        stream = self._stream
        if stream is None:
            return
        try:
            stream.flush()
        except (OSError, ValueError) as error:
            self._tell(error)

    def isatty(self) -> bool:
        with contextlib.suppress(ValueError):  # it is closed
            return self._stream is not None and self._stream.isatty()
        return False

    def fileno(self) -> int:
        if self._stream is None:
            raise io.UnsupportedOperation("fileno")
        return self._stream.fileno()

    def _tell(self, error: Exception) -> None:
        if not self._has_told:
            self._has_told = True
            log.warning(
                "the standard stream %s cannot be written; its lines are dropped: %s", self._name, error
            )


def lossy(name: str) -> IO[str]:
    """Return the stream for a console: ``stdout`` or ``stderr``."""
    return cast(IO[str], LossyStream(name))


def drop_unwritten() -> None:
    """Drop what the standard streams still hold if it cannot be written. Call it at a process's end.

    Otherwise Python would try again at its exit, and change the exit status to 120.
    """
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except (OSError, ValueError):
            with contextlib.suppress(OSError, ValueError):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, stream.fileno())
                os.close(nowhere)
