"""The journal: what it remembers over a server's end, and that it cannot mislead."""

import os
import random
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipemax.serve.rows.journal import Journal


def _key(number: int) -> bytes:
    return number.to_bytes(16)


def test_what_ran_at_a_kill_is_suspect_in_two_groups(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "a.journal")
    journal.start([_key(row) for row in range(5)])
    journal.end([_key(4)], good=True)
    journal.withdraw([_key(3)])
    successor = Journal(tmp_path / "a.journal")  # the first was not closed: its process was killed
    assert successor.suspects.groups == [{_key(0)}, {_key(1), _key(2)}]
    assert not successor.running


def test_an_orderly_end_makes_no_row_a_suspect_and_leaves_no_file(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "a.journal")
    journal.start([_key(1), _key(2)])
    journal.close()
    assert list(tmp_path.iterdir()) == []


def test_an_orderly_end_keeps_suspects_and_verdicts(tmp_path: Path) -> None:
    for _ in range(2):
        Journal(tmp_path / "a.journal").start([_key(1)])
    journal = Journal(tmp_path / "a.journal")
    journal.start([_key(2), _key(3)])
    journal = Journal(tmp_path / "a.journal")
    journal.close()
    successor = Journal(tmp_path / "a.journal").suspects
    assert successor.condemned == {_key(1)}
    assert successor.groups == [{_key(2)}, {_key(3)}]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32), limit=st.sampled_from([200, 10_000]))
def test_a_successor_knows_what_ran_however_often_the_file_was_compacted(
    tmp_path: Path, seed: int, limit: int
) -> None:
    path = tmp_path / f"{seed}-{limit}.journal"
    rng = random.Random(seed)
    journal, running = Journal(path, compact_bytes=limit), Counter[bytes]()
    for _ in range(60):
        started = [_key(rng.randrange(40)) for _ in range(rng.randrange(8))]
        journal.start(started)
        running.update(started)
        ended = rng.sample(sorted(running.elements()), rng.randrange(running.total() + 1))
        journal.end(ended, good=True)
        running.subtract(ended)
        running = +running
    assert journal.running == running
    suspects = set().union(*Journal(path).suspects.groups)
    assert suspects == set(running)
    assert path.stat().st_size < 10_000 + 2_000
    path.unlink()


@pytest.mark.parametrize("lost_bytes", range(1, 20))
def test_a_torn_journal_record_is_ignored(tmp_path: Path, lost_bytes: int) -> None:
    path = tmp_path / "a.journal"
    journal = Journal(path)
    journal.start([_key(1)])
    journal.start([_key(2)])
    os.truncate(path, path.stat().st_size - lost_bytes)
    assert Journal(path).suspects.groups == [{_key(1)}]


@pytest.mark.parametrize(
    "content", [b"not a journal, " * 9, b"\x01\x02\x00\x00\x00{}", b"\x63\x00\x00\x00\x00"]
)
def test_a_file_that_is_not_a_journal_makes_no_row_a_suspect(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a.journal"
    path.write_bytes(content)
    journal = Journal(path)
    assert journal.suspects.groups == []
    journal.start([_key(1)])
    assert Journal(path).suspects.groups == [{_key(1)}]


def test_a_journal_that_cannot_be_written_removes_itself_and_the_server_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "a.journal"
    journal = Journal(path)
    journal.start([_key(1)])
    assert journal._fd is not None
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, journal._fd)
    os.close(full)
    journal.end([_key(1)], good=True)
    assert not path.exists()
    journal.start([_key(2)])
    assert journal.running == {_key(2): 1}
    journal.close()
    assert Journal(path).suspects.groups == []
