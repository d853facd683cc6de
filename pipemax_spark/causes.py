"""Say in one sentence why an action of Spark's failed: what failed, and the innermost cause.

The first line of a Java exception often tells only what was going on: "Task failed while writing rows", "An exception
was thrown from the Python worker:". The cause is at the end of the chain of causes, or of a Python traceback. The chain
comes from the JVM or, if the JVM is gone, from the stack trace in the error's text.
"""

import re
from typing import Any

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
    outermost, innermost = _first_line(messages[0]), _told(messages[-1])
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


def _told(message: str) -> str:
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
    found = _MKDIRS.search(message)
    for name in found["path"].split("/") if found else ():
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
