"""tools/nightly.sh: over seven days, each long test's file has its day."""

import os
import subprocess
import time
from pathlib import Path

import pytest

from tests.conftest import pytest_runtest_setup
from tests.running_order import in_order

REPOSITORY = Path(__file__).parents[2]


def slice_of(day: int, place: Path) -> tuple[str, list[str]]:
    """Run the script with a Python that writes down its arguments; return the last line and the tests named."""
    place.mkdir()
    python = place / "python"
    python.write_text(f'#!/bin/sh\necho "$@" >> {place}/arguments\necho "$PIPEMAX_KINDS" > {place}/kinds\n')
    python.chmod(0o755)
    command = ["bash", "tools/nightly.sh", str(place), f"{day:03}"]
    done = subprocess.run(command, cwd=REPOSITORY, env=os.environ, check=True, capture_output=True, text=True)
    arguments = (place / "arguments").read_text().split()
    return done.stdout.splitlines()[-1], [each for each in arguments if each.startswith("tests/")]


def test_each_file_with_a_long_test_is_in_one_of_seven_slices(tmp_path: Path) -> None:
    days = [slice_of(day, tmp_path / str(day)) for day in range(7, 14)]
    for number, (line, _) in enumerate(days):
        assert line.startswith(f"nightly slice {number} of 0 to 6 ("), line
    named = {path for _, paths in days for path in paths}
    marks = ("mark.long", "parity_full", "marks=FULL")
    long_files = {
        path.relative_to(REPOSITORY)
        for path in (REPOSITORY / "tests").rglob("test_*.py")
        if path.parent.name not in ("unit", "site")
        and any(mark in path.read_text(encoding="utf-8") for mark in marks)
    }
    without_slice = [
        str(path)
        for path in long_files
        if str(path) not in named and not any(str(parent) in named for parent in path.parents)
    ]
    assert not without_slice
    assert sum("random_kills" in (tmp_path / str(day) / "arguments").read_text() for day in range(7, 14)) == 1


def test_each_kind_of_engine_has_every_load_within_four_weeks(tmp_path: Path) -> None:
    """Nights 5 and 6 of a week take two of the kinds each, by ``PIPEMAX_KINDS``."""
    days = range(7, 7 + 28)
    for day in days:
        slice_of(day, tmp_path / str(day))
    shares = [(tmp_path / str(day) / "kinds").read_text().strip() for day in days if day % 7 >= 5]
    assert {*shares} == {*"0123456"}


def test_what_had_no_time_in_one_week_is_in_the_first_third_of_one_of_the_next_two() -> None:
    names = [f"tests/spark/test_{letter}.py::test" for letter in "abcdefgh"]
    names += [f"tests/parity/test_families.py::test[{number}]" for number in range(7)]
    weeks = [[names[index] for index in in_order(names, week)] for week in (47, 48, 49)]
    for week in weeks:
        assert sorted(week) == sorted(names)
        assert "parity" in week[0], "engines first: one worker has them, the other one the rest"
    assert {name for week in weeks for name in week[:3]} == {*names[8:]}
    assert {name for week in weeks for name in week[7:10]} == {*names[:8]}


def test_no_test_begins_when_the_night_s_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIPEMAX_NIGHT_ENDS", str(time.time() + 60))
    pytest_runtest_setup()
    monkeypatch.setenv("PIPEMAX_NIGHT_ENDS", str(time.time() - 1))
    with pytest.raises(pytest.skip.Exception, match="the night's time is over"):
        pytest_runtest_setup()
