"""Define the errors that end an annotation on Spark's side, and the effect of a row's error."""

import re
from enum import StrEnum
from typing import Self

from pipemax.wire import SessionErrorCode
from pipemax_spark.causes import cause_of, first_line

__all__ = [
    "CommitRefusedError",
    "EngineSessionError",
    "JobError",
    "JobFailedError",
    "OnError",
    "RowFailedError",
    "SessionErrorCode",
    "cause_of",
    "failure_text",
    "first_line",
    "is_interrupt",
]


class EngineSessionError(RuntimeError):
    """The engine server cannot serve this task. The message says why and what to do; ``code`` is for programs."""

    def __init__(self, code: SessionErrorCode, message: str) -> None:
        super().__init__(code, message)
        self.code = code
        self.message = message

    def __str__(self) -> str:
        return f"{self.code}: {self.message}"


class JobError(ValueError):
    """An error that the user can fix: one sentence with the value and the remedy, no traceback."""


class JobFailedError(RuntimeError):
    """The job stopped itself; the message says why. Chunks that are already committed stay."""


class CommitRefusedError(RuntimeError):
    """The table refused a commit, because another one landed under its application id meanwhile."""


class RowFailedError(RuntimeError):
    """A row ended in an error under ``--on-error fail``."""


class OnError(StrEnum):
    """The effect of a row's error."""

    ROW = "row"
    """Keep the error in the row's annotation."""
    FAIL = "fail"
    """End the run with ``RowFailedError``."""

    @classmethod
    def of(cls, text: str) -> Self:
        """Read the value from text. Raise ``JobError`` if the text is neither."""
        try:
            return cls(text)
        except ValueError as error:
            raise JobError(
                f"on-error is {text!r}; give 'row' (keep error rows) or 'fail' (end at the first one)"
            ) from error


def failure_text(error: BaseException) -> str:
    """Return the error as one sentence.

    For an exception that a task raised, return that exception's own message, without Spark's and Python's traces.
    """
    text = str(error)
    if isinstance(error, JobFailedError):
        return text
    for name in ("EngineSessionError", "RowFailedError"):
        if found := re.findall(rf"^(?:\S+\.)?{name}: (.+)$", text, re.MULTILINE):
            return str(found[-1])
    return cause_of(error)


def is_interrupt(error: BaseException) -> bool:
    """Tell whether the error is Ctrl-C or its consequence.

    Under spark-submit the JVM gets Ctrl-C too and is gone, so calls to it fail.
    """
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, KeyboardInterrupt):
            return True
        seen = seen.__cause__ or seen.__context__
    return False
