"""Define the errors that end an annotation on Spark's side, and the effect of a row's error."""

import re
from enum import StrEnum
from typing import Self, TypeVar

from pipemax.wire import SessionErrorCode
from pipemax_spark.causes import cause_of, first_line

__all__ = [
    "CommitRefusedError",
    "EndedBy",
    "EngineSessionError",
    "IfRunning",
    "JobError",
    "JobFailedError",
    "OnError",
    "OtherRunError",
    "RowCountError",
    "RowFailedError",
    "SessionErrorCode",
    "TakenOverError",
    "TooManyErrorsError",
    "cause_of",
    "ended_by",
    "failure_text",
    "first_line",
    "is_interrupt",
]


_Choice = TypeVar("_Choice", bound=StrEnum)


class EngineSessionError(RuntimeError):
    """The engine server cannot serve this task. The message says why and what to do; ``code`` is for programs."""

    def __init__(self, code: SessionErrorCode, message: str) -> None:
        super().__init__(code, message)
        self.code = code
        self.message = message

    def __str__(self) -> str:
        return f"{self.code}: {self.message}"


class EndedBy(StrEnum):
    """What ended a run of the job: ``ended_by`` in its summary. ``docs/guide/ends.md`` says what to do about each."""

    DONE = "done"
    """All rows that were left are in the output."""
    LIMIT = "limit"
    """``--limit`` leaves rows for a later run."""
    ERROR_ROWS = "error_rows"
    """More error rows than ``--max-error-rate`` or ``--on-error fail`` allows."""
    OTHER_RUN = "other_run"
    """Another run is writing to the output."""
    TAKEN_OVER = "taken_over"
    """Another run has taken the output over."""
    ROW_COUNT = "row_count"
    """The input has other than ``--expect-rows`` rows, or none under ``--fail-if-empty``."""
    REFUSED = "refused"
    """An error in the call or the input, found before any engine started."""
    INTERRUPT = "interrupt"
    """Ctrl-C, or the notebook's button."""
    FAILURE = "failure"
    """Anything else that failed."""


class JobError(ValueError):
    """An error that the user can fix: one sentence with the value and the remedy, no traceback."""

    ended_by = EndedBy.REFUSED


class OtherRunError(JobError):
    """Another run is writing to the output now."""

    ended_by = EndedBy.OTHER_RUN


class RowCountError(JobError):
    """The input does not have as many rows as the caller expects."""

    ended_by = EndedBy.ROW_COUNT

    def __init__(self, message: str, *, rows: int) -> None:
        super().__init__(message)
        self.rows = rows


class JobFailedError(RuntimeError):
    """The job stopped itself; the message says why. Chunks that are already committed stay."""

    ended_by = EndedBy.FAILURE


class TooManyErrorsError(JobFailedError):
    """More rows failed than the job allows."""

    ended_by = EndedBy.ERROR_ROWS


class TakenOverError(JobFailedError):
    """Another run has taken the output over."""

    ended_by = EndedBy.TAKEN_OVER


class CommitRefusedError(RuntimeError):
    """The table refused a commit, because another one landed under its application id meanwhile."""


class RowFailedError(RuntimeError):
    """A row ended in an error under ``--on-error fail``."""


def read_choice(kind: type[_Choice], option: str, text: str, meanings: str) -> _Choice:
    """Return the value that the text names. Raise ``JobError`` with the values' meanings if it names none."""
    try:
        return kind(text)
    except ValueError as error:
        raise JobError(f"{option} is {text!r}; give {meanings}") from error


class OnError(StrEnum):
    """The effect of a row's error."""

    ROW = "row"
    """Keep the error in the row's annotation."""
    FAIL = "fail"
    """End the run with ``RowFailedError``."""

    @classmethod
    def of(cls, text: str) -> Self:
        """Read the value from text. Raise ``JobError`` if the text is neither."""
        return read_choice(cls, "on-error", text, "'row' (keep error rows) or 'fail' (end at the first one)")


class IfRunning(StrEnum):
    """What a run does while another run is writing to its output."""

    FAIL = "fail"
    """Refuse to start."""
    SKIP = "skip"
    """End at once, as a success."""
    TAKE_OVER = "take-over"
    """Stop the other run and do the rest."""

    @classmethod
    def of(cls, text: str) -> Self:
        """Read the value from text. Raise ``JobError`` if the text is none of them."""
        meanings = (
            "'fail' (refuse to start), 'skip' (end at once, as a success) or "
            "'take-over' (stop the other run and do the rest)"
        )
        return read_choice(cls, "if-running", text, meanings)


def ended_by(error: BaseException) -> EndedBy:
    """Return what ended the run that raised this error."""
    if is_interrupt(error):
        return EndedBy.INTERRUPT
    if re.search(rf"^(?:\S+\.)?{RowFailedError.__name__}: ", str(error), re.MULTILINE):
        return EndedBy.ERROR_ROWS
    known: EndedBy = getattr(error, "ended_by", EndedBy.FAILURE)
    return known


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
