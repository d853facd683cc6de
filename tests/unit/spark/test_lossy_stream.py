"""A job's lines on a stream that cannot be written."""

import io
import logging
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from pipemax_spark.report.lossy_stream import LossyStream
from pipemax_spark.report.terminal import Terminal

PROGRAM = """
import logging, sys, time
from pipemax_spark.cli import _fail
from pipemax_spark.report.lossy_stream import drop_unwritten
from pipemax_spark.report.terminal import Terminal
logging.basicConfig(filename=sys.argv[1])
try:
    terminal = Terminal.standard()
    with terminal.progress_line() as (show, _):
        for line in range(3_000):
            terminal.say("Line", f"{line} " + "x" * 100)
            show(f"{line} of 3,000")
            if line < 3:
                time.sleep(0.02)
    terminal.warn("ünicode …")
    _fail("the end", 1)
    open(sys.argv[2], "w").write("all done")
    sys.exit(7)
finally:
    drop_unwritten()
"""


@pytest.mark.parametrize(
    ("output", "is_dropped"),
    [
        ("| head -1 > /dev/null", True),
        ("> /dev/full", True),
        pytest.param("> /dev/full 2>&1", True, marks=pytest.mark.long),
        (">&-", False),  # Python has no such stream then
        pytest.param(">&- 2>&-", False, marks=pytest.mark.long),
        ("> /dev/null", False),
    ],
)
def test_the_work_goes_on_and_keeps_its_exit_status(tmp_path: Path, output: str, is_dropped: bool) -> None:
    script = f'"$0" -c "$1" "$2" "$3" {output}; exit ${{PIPESTATUS[0]}}'
    files = [str(tmp_path / "log"), str(tmp_path / "done")]
    run = subprocess.run(
        ["bash", "-c", script, sys.executable, PROGRAM, *files],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert run.returncode == 7, run.stderr
    assert (tmp_path / "done").read_text() == "all done"
    assert "Traceback" not in run.stderr
    log = (tmp_path / "log").read_text()
    assert ("the standard stream stdout cannot be written; its lines are dropped: " in log) is is_dropped
    assert log.count("stream stdout") <= 1


class Broken(io.StringIO):
    def __init__(self, error: Callable[[], Exception]) -> None:
        super().__init__()
        self._error = error

    def write(self, text: str) -> int:
        raise self._error()

    def flush(self) -> None:
        raise self._error()


@pytest.mark.parametrize(
    "error",
    [BrokenPipeError, lambda: OSError(28, "No space left on device"), lambda: ValueError("closed file")],
)
def test_any_failure_of_the_stream_is_logged_once(
    error: Callable[[], Exception], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys, "stdout", Broken(error))
    terminal = Terminal.standard()
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            terminal.say("Line", "text")
    assert caplog.text.count("cannot be written") == 1


def test_text_that_the_stream_cannot_encode_is_written_with_question_marks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    Terminal.standard().say("Größe", "1 …")
    assert written.getvalue() == b"Gr??e    1 ?\n"


def test_the_stream_is_the_one_that_sys_has_when_it_is_written(capsys: pytest.CaptureFixture[str]) -> None:
    stream = LossyStream("stdout")
    print("one", file=stream)
    assert capsys.readouterr().out == "one\n"
    assert not stream.isatty()
