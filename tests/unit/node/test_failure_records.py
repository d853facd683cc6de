"""Failures of other processes reach the one that asked for them, and nothing else is written to."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pipemax.node.failure_records import FAILURES_VARIABLE, Failure, FailureRecords, record

CHILD = """
import logging, logging.config
from pipemax.node.lifetime import end_with_server
end_with_server(); end_with_server()
logging.config.dictConfig({"version": 1, "loggers": {"vllm": {"level": "INFO"}}, "disable_existing_loggers": False})
try:
    try:
        open("/no/such/file")
    except OSError as error:
        raise RuntimeError("wrapped") from error
except RuntimeError:
    logging.getLogger("vllm.v1.engine.core").exception("EngineCore failed to start.")
"""


def test_a_child_s_exception_is_read_once_with_its_first_cause() -> None:
    """Also once the child configures logging, as vLLM's processes do."""
    records = FailureRecords()
    environment = {**os.environ, FAILURES_VARIABLE: records.path}
    subprocess.run([sys.executable, "-c", CHILD], env=environment, check=True)
    (failure,) = records.read()
    assert (failure.error, failure.process) == ("FileNotFoundError", "MainProcess")
    assert "/no/such/file" in failure.message
    assert failure.place == "<string>:8 in <module>"
    records.close()


def test_a_file_that_took_the_place_of_closed_records_is_not_written_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = FailureRecords()
    monkeypatch.setenv(FAILURES_VARIABLE, records.path)
    number = int(Path(records.path).name)
    records.close()
    with (tmp_path / "other").open("wb") as other:
        if other.fileno() != number:
            os.dup2(other.fileno(), number)
        record(Failure(pid=1, process="late", exit_code=1))
        if other.fileno() != number:
            os.close(number)
    assert (tmp_path / "other").read_bytes() == b""
