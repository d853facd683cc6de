"""Define the errors that end an annotation on Spark's side, and the effect of a row's error."""

import re
from enum import StrEnum
from typing import Any, Self, TypeVar

from pipemax.wire import SessionErrorCode

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
    MAX_COST = "max_cost"
    """``--max-cost`` is reached, or no chunk fits into what is left of it."""
    MAX_HOURS = "max_hours"
    """Likewise ``--max-hours``."""
    MAX_TOKENS_TOTAL = "max_tokens_total"
    """Likewise ``--max-tokens-total``."""
    DONE_BY = "done_by"
    """Likewise ``--done-by``."""
    ERROR_ROWS = "error_rows"
    """More error rows than ``--max-error-rate`` or ``--on-error fail`` allows."""
    CANARY = "canary"
    """The first rows differ from those of the last run (``--canary``)."""
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


class CanaryError(JobFailedError):
    """The run's first rows differ from those of the last run; nothing else was annotated."""

    ended_by = EndedBy.CANARY


class LimitReachedError(JobFailedError):
    """A limit on cost, time or tokens is reached. The job catches it: such a run ends in order."""

    def __init__(self, message: str, *, ended_by: EndedBy) -> None:
        super().__init__(message)
        self.ended_by = ended_by


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


class NewSpec(StrEnum):
    """What becomes of the rows of other specs when rows are annotated in a new way."""

    STACK = "stack"
    """They stay next to the new ones."""
    REPLACE = "replace"
    """Each leaves in the commit that brings its row's new answer."""

    @classmethod
    def of(cls, value: str | bool | None) -> Self | None:
        """Read the value from text; True is ``STACK``. Raise ``JobError`` if the text is neither."""
        if value is None or isinstance(value, bool):
            return cls("stack") if value else None
        meanings = (
            "'stack' (keep the old rows next to the new ones) or 'replace' (remove each with its new one)"
        )
        return read_choice(cls, "new-spec", value, meanings)


class OnDelete(StrEnum):
    """What becomes of an output's row when the input has deleted its row."""

    KEEP = "keep"
    """It stays."""
    MARK = "mark"
    """It stays, and the time is written next to it."""
    REMOVE = "remove"
    """It leaves the output."""

    @classmethod
    def of(cls, text: str) -> Self:
        """Read the value from text. Raise ``JobError`` if the text is none of them."""
        meanings = "'keep' (the output's rows stay), 'mark' (they stay, and get the time) or 'remove'"
        return read_choice(cls, "on-delete", text, meanings)


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
        if messages := re.findall(rf"^(?:\S+\.)?{name}: (.+)$", text, re.MULTILINE):
            return str(messages[-1])
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


_MAX_CHARACTERS = 600
_MAX_CAUSES = 20
_MAX_NAME_BYTES = 255
"""Of a file or a directory, on all common file systems."""
_TRACEBACK = "Traceback (most recent call last):"
_DIRECT_CAUSE = "The above exception was the direct cause of the following exception:"
_OF_JAVA = re.compile(r"^: (\S.+)$", re.MULTILINE)
"""py4j puts "An error occurred while calling o749.save." before Java's message."""
_CAUSED_BY = re.compile(r"^\s*Caused by: (\S.*)$", re.MULTILINE)
_SENTENCE_END = re.compile(r"""(?<=[.!?])["')\]]*\s+(?=[A-Z\["'])""")
_SQL_STATE = re.compile(r"\s*\bSQLSTATE: \w{5}\b")
_CLASS = re.compile(r"^(?:[\w$]+\.)+[\w$]+: ")
_TELLING_CLASS = re.compile(r"java\.lang\.\w*(?:Error|NullPointerException)")
"""Classes that tell the cause without a message; an EOFException, say, does not."""
_ABORTED = "Job aborted due to stage failure"
_MKDIRS = re.compile(r"Mkdirs failed to create (?P<path>.+?)(?: \(exists=|$)", re.DOTALL)


def cause_of(error: BaseException) -> str:
    """Return what failed and, if it is not the same, the innermost cause, in one sentence each."""
    messages = _messages(error)
    outermost, innermost = _first_line(messages[0]), _telling_sentence(messages[-1])
    if not innermost:
        return outermost or type(error).__name__
    if (
        _bare(outermost).endswith(":")
        or _ABORTED in outermost
        or _bare(outermost).startswith(_bare(innermost))
    ):
        return innermost if len(messages) > 1 or outermost.endswith(":") else outermost
    if _bare(innermost) in outermost:
        return outermost
    return f"{outermost.rstrip('. ')}: {innermost}"


def first_line(error: BaseException) -> str:
    """Return the first line of the error's text that is not blank, or the name of its class."""
    return _first_line(str(error)) or type(error).__name__


def _messages(error: BaseException) -> list[str]:
    """Return what the exceptions of the chain say, the outermost first: at least one text, perhaps an empty one."""
    text = str(error)
    of_java = _OF_JAVA.search(text)
    outermost = text[of_java.start(1) :] if of_java else text
    chain = _java_chain(error)
    if len(chain) > 1:
        return [outermost, *chain[1:]]
    return [outermost, *_CAUSED_BY.findall(text)]


def _java_chain(error: BaseException) -> list[str]:
    """Return class and message of each Java exception that tells something, the outermost first."""
    exception: Any = getattr(error, "java_exception", None) or getattr(error, "_origin", None)
    chain: list[str] = []
    try:
        while exception is not None and len(chain) < _MAX_CAUSES:
            name, message = str(exception.getClass().getName()), str(exception.getMessage() or "").strip()
            if message or _TELLING_CLASS.fullmatch(name) or not chain:
                chain.append(f"{name}: {message}" if message else name)
            exception = exception.getCause()
    except Exception:  # the JVM is gone, and the error's text is all there is
        return []
    return chain


def _telling_sentence(message: str) -> str:
    """Return the sentence of a message that tells the cause."""
    if (names := _unusable_name(message)) is not None:
        return names
    if _TRACEBACK in message:
        errors = [_python_error(part) for part in message.split(_DIRECT_CAUSE) if _TRACEBACK in part]
        first, last = errors[0], errors[-1]
        return last if first in last else f"{last}: {first}"
    if causes := _CAUSED_BY.findall(message):
        return _first_sentence(causes[-1])
    line = _first_line(message)
    return _first_sentence(line if not line.endswith(":") else _joined(message))


def _python_error(traceback: str) -> str:
    """Return the line of a traceback that names the exception, without the frames above it."""
    lines = traceback.rpartition(_TRACEBACK)[2].splitlines()
    return next((_short(line.strip()) for line in lines if line.strip() and not line.startswith(" ")), "")


def _unusable_name(message: str) -> str | None:
    """Return what is wrong with a directory that could not be made for a partition, or None if it is not that."""
    match = _MKDIRS.search(message)
    for name in match["path"].split("/") if match else ():
        column, is_partition, value = name.partition("=")
        if not is_partition:
            continue
        if (num_bytes := len(name.encode(errors="replace"))) > _MAX_NAME_BYTES:
            return (
                f"File name too long: a value of partition column {column!r} makes a directory's name of "
                f"{num_bytes:,} bytes, and {_MAX_NAME_BYTES} are possible"
            )
        if not value.isprintable() or "\N{REPLACEMENT CHARACTER}" in value:
            return f"a value of partition column {column!r} cannot be a directory's name: {value!r}"
    return None


def _first_line(text: str) -> str:
    lines = (_SQL_STATE.sub("", line).strip() for line in text.splitlines())
    return _short(next((line for line in lines if line), ""))


def _joined(message: str) -> str:
    """Return the lines of a message, without those of a stack trace, as one."""
    return " ".join(_SQL_STATE.sub("", message.partition("\n\tat ")[0]).split())


def _first_sentence(text: str) -> str:
    return _short(_SENTENCE_END.split(_SQL_STATE.sub("", text).strip(), maxsplit=1)[0])


def _short(text: str) -> str:
    return text if len(text) <= _MAX_CHARACTERS else f"{text[:_MAX_CHARACTERS]}…"


def _bare(text: str) -> str:
    return _CLASS.sub("", text).rstrip(". ")
