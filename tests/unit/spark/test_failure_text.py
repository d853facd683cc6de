"""What a failed job says in one sentence."""

from types import SimpleNamespace
from typing import Any

import pytest

from pipemax_spark.errors import JobFailedError, failure_text

_OF_A_TASK = """Job aborted due to stage failure: Task 1 in stage 3.0 failed 4 times, most recent failure:
org.apache.spark.api.python.PythonException: Traceback (most recent call last):
  File "client.py", line 130, in batches
pipemax_spark.errors.EngineSessionError: engine_died: the engine server was lost 3 times in a row

Driver stacktrace:"""
_OF_JAVA = """An error occurred while calling o749.save.
: io.delta.exceptions.MetadataChangedException: [DELTA_METADATA_CHANGED] The metadata has been changed.
\tat io.delta.exceptions.MetadataChangedException.create(Unknown Source)"""


class JavaException:
    """What py4j shows of a Java exception."""

    def __init__(self, name: str, message: str | None, cause: "JavaException | None" = None) -> None:
        self._name, self._message, self._cause = name, message, cause

    def getClass(self) -> Any:  # noqa: N802
        return SimpleNamespace(getName=lambda: self._name)

    def getMessage(self) -> str | None:  # noqa: N802
        return self._message

    def getCause(self) -> "JavaException | None":  # noqa: N802
        return self._cause


class OfJavaError(Exception):
    """As py4j's: the text has the outermost exception and its trace, ``java_exception`` the chain."""

    def __init__(self, *chain: tuple[str, str | None]) -> None:
        exception: JavaException | None = None
        for name, message in reversed(chain):
            exception = JavaException(name, message, exception)
        self.java_exception = exception
        name, message = chain[0]
        super().__init__(
            f"An error occurred while calling o1.save.\n: {name}: {message}\n\tat a.b(C.scala:1)"
        )


class OfDeadJvmError(Exception):
    """Every question to its exception fails."""

    @property
    def java_exception(self) -> Any:
        return self

    def getClass(self) -> Any:  # noqa: N802
        raise ConnectionRefusedError("the JVM is gone")


SPARK = "org.apache.spark.SparkException"
WRITE_FAILED = (SPARK, "[TASK_WRITE_FAILED] Task failed while writing rows to file:/t. SQLSTATE: 58030")
TOLD_WRITE_FAILED = f"{SPARK}: [TASK_WRITE_FAILED] Task failed while writing rows to file:/t"
MKDIRS = "Mkdirs failed to create file:/t/{} (exists=false, cwd=file:/w)"
PYTHON = """[PYTHON_EXCEPTION] An exception was thrown from the Python worker: Traceback (most recent call last):
  File "/a.py", line 30, in f
    raise ValueError("a sentence")
{}ValueError: a sentence
second line
 SQLSTATE: 38000"""
FIRST_TRACEBACK = """KeyError: 'lang'

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "/b.py", line 3, in g
"""


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (JobFailedError("too many\nerrors"), "too many\nerrors"),
        (RuntimeError(_OF_A_TASK), "engine_died: the engine server was lost 3 times in a row"),
        (
            RuntimeError(_OF_JAVA),
            "io.delta.exceptions.MetadataChangedException: [DELTA_METADATA_CHANGED] The metadata has been changed.",
        ),
        (RuntimeError("\n disk gone \nmore"), "disk gone"),
        (RuntimeError(), "RuntimeError"),
        (
            OfJavaError(WRITE_FAILED, WRITE_FAILED, ("java.io.IOException", "No space left on device")),
            f"{TOLD_WRITE_FAILED}: java.io.IOException: No space left on device",
        ),
        (
            OfJavaError(WRITE_FAILED, ("java.io.IOException", MKDIRS.format(f"lang={'x' * 300}"))),
            f"{TOLD_WRITE_FAILED}: File name too long: a value of partition column 'lang' makes a directory's name of "
            "305 bytes, and 255 are possible",
        ),
        (
            OfJavaError(WRITE_FAILED, ("java.io.IOException", MKDIRS.format(f"a=1/tag={'ü' * 130}"))),
            f"{TOLD_WRITE_FAILED}: File name too long: a value of partition column 'tag' makes a directory's name of "
            "264 bytes, and 255 are possible",
        ),
        (
            OfJavaError(WRITE_FAILED, ("java.io.IOException", MKDIRS.format("p=\x00\ufffd"))),
            f"{TOLD_WRITE_FAILED}: a value of partition column 'p' cannot be a directory's name: '\\x00\ufffd'",
        ),
        (
            OfJavaError(WRITE_FAILED, ("java.io.IOException", MKDIRS.format("p=1"))),
            f"{TOLD_WRITE_FAILED}: java.io.IOException: Mkdirs failed to create file:/t/p=1 (exists=false, "
            "cwd=file:/w)",
        ),
        (
            OfJavaError(
                (
                    SPARK,
                    '[CANNOT_MERGE_SCHEMAS] Failed merging schemas:\nInitial schema:\n"A"\nother schema "B".',
                ),
                (
                    SPARK,
                    '[CANNOT_MERGE] Failed to merge data types "A" and "B". Please check them. SQLSTATE: 42825',
                ),
            ),
            f'{SPARK}: [CANNOT_MERGE] Failed to merge data types "A" and "B".',
        ),
        (
            OfJavaError(
                (
                    SPARK,
                    "[CANNOT_MERGE_SCHEMAS] Failed merging schemas:\nInitial schema:\n  A\nand B. SQLSTATE: 42KD9",
                )
            ),
            f"{SPARK}: [CANNOT_MERGE_SCHEMAS] Failed merging schemas: Initial schema: A and B.",
        ),
        (
            OfJavaError(
                (SPARK, "Job aborted due to stage failure: Task 0 failed, most recent failure: Lost task: x"),
                (SPARK, "Python worker exited unexpectedly (crashed). Consider setting an option."),
                ("java.io.EOFException", None),
            ),
            f"{SPARK}: Python worker exited unexpectedly (crashed).",
        ),
        (
            OfJavaError(
                (SPARK, "Job aborted due to stage failure: Lost task: x"),
                ("java.lang.StackOverflowError", None),
            ),
            "java.lang.StackOverflowError",
        ),
        (OfJavaError((SPARK, PYTHON.format(""))), "ValueError: a sentence"),
        (
            OfJavaError(
                (SPARK, "Job aborted due to stage failure: x"), (SPARK, PYTHON.format(FIRST_TRACEBACK))
            ),
            "ValueError: a sentence: KeyError: 'lang'",
        ),
        (RuntimeError(PYTHON.format(FIRST_TRACEBACK)), "ValueError: a sentence: KeyError: 'lang'"),
        (
            OfJavaError(
                (
                    SPARK,
                    "[FAILED_READ_FILE.NO_HINT] Encountered error while reading file x.  SQLSTATE: KD001",
                ),
                ("java.lang.RuntimeException", "the footer index is not within the file: -5"),
            ),
            f"{SPARK}: [FAILED_READ_FILE.NO_HINT] Encountered error while reading file x: "
            "java.lang.RuntimeException: the footer index is not within the file: -5",
        ),
        (
            OfDeadJvmError(
                ": a.B: while writing\n\tat c.D\nCaused by: a.C: on the way\n\tat c.D\nCaused by: a.E: disk full"
            ),
            "a.B: while writing: a.E: disk full",
        ),
        (OfJavaError((SPARK, "x" * 5_000)), f"{SPARK}: {'x' * (600 - len(SPARK) - 2)}…"),
        (OfJavaError(("a.B", None)), "a.B: None"),
    ],
)
def test_the_error_sentence_says_what_failed_and_its_innermost_cause(error: Exception, told: str) -> None:
    assert failure_text(error) == told
