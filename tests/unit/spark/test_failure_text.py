"""What a failed job says in one sentence."""

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


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (JobFailedError("too many\nerrors"), "too many\nerrors"),
        (RuntimeError(_OF_A_TASK), "engine_died: the engine server was lost 3 times in a row"),
        (
            RuntimeError(_OF_JAVA),
            "io.delta.exceptions.MetadataChangedException: [DELTA_METADATA_CHANGED] The metadata has been changed.",
        ),
        (RuntimeError("\n disk gone \nmore"), "disk gone"),
        (RuntimeError(), "RuntimeError"),
    ],
    ids=["the job's own", "a task's", "Java's", "a first line", "nothing"],
)
def test_the_error_sentence_says_what_failed(error: Exception, text: str) -> None:
    assert failure_text(error) == text
