"""What ends an annotation on this side."""

import re
from enum import StrEnum
from typing import Self

from pipemax.wire import SessionErrorCode

__all__ = [
    "CommitRefusedError",
    "EngineSessionError",
    "JobError",
    "JobFailedError",
    "OnError",
    "RowFailedError",
    "SessionErrorCode",
    "cause_of",
    "first_line",
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
    """Something that the user can mend: one sentence with the value and the remedy, no traceback."""


class JobFailedError(RuntimeError):
    """The job ended itself; the message says why. Chunks committed before stay."""


class CommitRefusedError(RuntimeError):
    """Delta refused a commit: another one has landed under its application id meanwhile."""


class RowFailedError(RuntimeError):
    """A row ended in an error under ``--on-error fail``."""


class OnError(StrEnum):
    """What a row's error does."""

    ROW = "row"
    """It is kept in the row's annotation."""
    FAIL = "fail"
    """It ends the run: ``RowFailedError``."""

    @classmethod
    def of(cls, text: str) -> Self:
        """``JobError`` where the text is neither."""
        try:
            return cls(text)
        except ValueError as error:
            raise JobError(
                f"on-error is {text!r}; give 'row' (keep error rows) or 'fail' (end at the first one)"
            ) from error


def cause_of(error: BaseException) -> str:
    """One sentence: Java's own where the error came from the JVM."""
    # py4j puts "An error occurred while calling o749.save." before it.
    of_java = re.search(r"^: (\S.+)$", str(error), re.MULTILINE)
    return of_java[1] if of_java else first_line(error)


def first_line(error: BaseException) -> str:
    """The first line of its text that is not blank, or its name."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[0].strip() if lines else type(error).__name__
