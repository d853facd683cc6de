"""A log that several processes write to stays within its bounds, and what came last is there."""

import logging
import os
import subprocess
import sys
from pathlib import Path

from pipemax.node.bounded_log import BoundedLog
from pipemax.node.repeated_lines import MAX_LINES, PERIOD_S, RepeatedLines

WRITER = "import sys\nfor line in sys.stdin: print(line.strip(), flush=True)"
LINES = 500


def test_the_newest_lines_are_kept_while_other_processes_go_on_writing(tmp_path: Path) -> None:
    path = tmp_path / "engine.log"
    bounded = BoundedLog(path, max_bytes=2_000)
    output = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER], stdin=subprocess.PIPE, stdout=output, text=True)
        for _ in range(2)
    ]
    written = 0
    for number in range(LINES):
        for name, writer in zip("ab", writers, strict=True):
            assert writer.stdin is not None
            line = f"{name} {number}\n"
            writer.stdin.write(line)
            writer.stdin.flush()
            written += len(line)
            while os.fstat(output).st_size == 0 or not path.read_text().endswith(line):
                pass  # the writer has read the line and not yet printed it
        bounded.look()
        assert path.stat().st_size <= 2_000
    for writer in writers:
        writer.communicate()
    os.close(output)
    kept = (bounded.older.read_text() + path.read_text()).splitlines()
    assert sum(len(line) + 1 for line in kept) <= 4_000 < written
    everything = [f"{name} {number}" for number in range(LINES) for name in "ab"]
    assert kept[1:] == everything[1 - len(kept) :], "the first line may be cut"


def test_of_a_log_that_has_outgrown_its_bounds_the_last_part_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "engine.log"
    path.write_text("".join(f"{number:09}\n" for number in range(1_000)))
    bounded = BoundedLog(path, max_bytes=50)
    bounded.look()
    assert (bounded.older.read_text().split(), path.read_text()) == (
        ["000000995", "000000996", "000000997", "000000998", "000000999"],
        "",
    )


def test_a_log_that_cannot_be_copied_is_emptied_all_the_same(tmp_path: Path) -> None:
    path = tmp_path / "engine.log"
    path.write_text("x" * 100)
    bounded = BoundedLog(path, max_bytes=50)
    bounded.older.symlink_to("/dev/full")  # as on a full disk
    bounded.look()
    assert path.read_text() == ""
    assert not bounded.older.exists()


def test_a_log_that_is_small_or_gone_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "engine.log"
    bounded = BoundedLog(path, max_bytes=50)
    bounded.look()
    assert not path.exists()
    path.write_text("x" * 50)
    bounded.look()
    assert path.read_text() == "x" * 50


def test_a_line_that_repeats_is_written_so_often_and_then_counted() -> None:
    held_back = RepeatedLines()

    def log(at_s: float, place: int = 1) -> str | None:
        record = logging.LogRecord("engine", logging.WARNING, "file.py", place, "row %d", (7,), None)
        record.created = at_s
        return record.getMessage() if held_back.filter(record) else None

    written = [log(0.001 * number) for number in range(10_000)]
    assert written[: MAX_LINES - 1] == ["row 7"] * (MAX_LINES - 1)
    assert (
        written[MAX_LINES - 1]
        == "row 7 (further lines from this place are left out, for 60 s from the first on)"
    )
    assert set(written[MAX_LINES:]) == {None}
    assert log(1.0, place=2) == "row 7", "another place"
    assert log(PERIOD_S) == "row 7 (9,940 lines from this place were left out before this one)"
    assert log(PERIOD_S + 1) == "row 7"
