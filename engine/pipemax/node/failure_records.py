"""Tell the process that starts an engine why one of the engine's processes failed.

vLLM's processes write an exception to their log and end; their parent hears only that they have ended. So each of
them also appends it to a file in memory that the parent names in the environment.
"""

import contextlib
import json
import logging
import os
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

FAILURES_VARIABLE = "PIPEMAX_FAILURES"
"""The file that failures are appended to, set by whoever starts an engine."""

_FILE_NAME = "pipemax-failures"
_LOGGERS = ("vllm.v1.engine.core", "vllm.v1.executor.multiproc_executor")
"""Log the exception that ends vLLM's core, and that of a worker."""
_MOST_CHARACTERS = 4_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """An exception that a process raised, or the way in which a process ended without raising any."""

    pid: int
    process: str
    """The name that vLLM gave the process."""
    exit_code: int | None = None
    """Of a process that ended by itself: its status, or the negative number of the signal that killed it."""
    error: str = ""
    """The exception's class, with its module."""
    message: str = ""
    place: str = ""
    """The innermost frame: file, line and function."""

    @classmethod
    def of(cls, error: BaseException, *, process: str = "") -> Self:
        """Describe an exception of this process by what first caused it."""
        error = innermost(error)
        frames = traceback.extract_tb(error.__traceback__)
        place = f"{frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name}" if frames else ""
        kind = type(error)
        return cls(
            pid=os.getpid(),
            process=process,
            error=f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins."),
            message=str(error)[:_MOST_CHARACTERS],
            place=place,
        )


class FailureRecords:
    """What the processes of one engine have recorded. Ends with ``close`` or with this process."""

    def __init__(self) -> None:
        self._file = os.fdopen(os.memfd_create(_FILE_NAME), "rb")

    @property
    def path(self) -> str:
        """The file, as the value of ``FAILURES_VARIABLE`` for other processes of this user."""
        return f"/proc/{os.getpid()}/fd/{self._file.fileno()}"

    def read(self) -> list[Failure]:
        """Return all failures in the order in which they were recorded."""
        self._file.seek(0)
        return [Failure(**json.loads(line)) for line in self._file]

    def close(self) -> None:
        """Give the file up. Failures that are recorded later are lost."""
        self._file.close()


def innermost(error: BaseException) -> BaseException:
    """Return the exception that first caused this one: vLLM wraps an error several times."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def record(failure: Failure) -> None:
    """Append a failure for the process that started the engine, if it asked for that and still lives."""
    path = os.environ.get(FAILURES_VARIABLE)
    if path is None:
        return
    line = json.dumps(asdict(failure)).encode() + b"\n"
    with contextlib.suppress(OSError):  # nobody is left who would read it
        fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            # Once the records are closed, another file of that process may have their number.
            if Path(f"/proc/self/fd/{fd}").readlink().name.startswith(f"memfd:{_FILE_NAME} "):
                os.write(fd, line)  # in one write, as other processes append too
        finally:
            os.close(fd)


def record_what_vllm_logs() -> None:
    """Record each exception that ends vLLM's core or a worker from now on. May be called more than once."""
    for name in _LOGGERS:
        logger = logging.getLogger(name)
        if not any(isinstance(known, _Recorder) for known in logger.filters):
            logger.addFilter(_Recorder())


class _Recorder(logging.Filter):
    """Lets every line through. Not a handler: vLLM's processes configure logging, which takes all handlers away."""

    def filter(self, log_record: logging.LogRecord) -> bool:
        error = log_record.exc_info[1] if log_record.exc_info else None
        if error is not None:
            record(Failure.of(error, process=log_record.processName or ""))
        return True
