"""Runs that claim one table at once and commit on all lanes, against Delta's and Iceberg's rules in memory.

Real Delta is in ``tests/spark/test_fence.py``; here are many interleavings of it.
"""

import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import pytest

from pipemax_spark.errors import CommitRefusedError, JobFailedError
from pipemax_spark.storage.fence import CANARY_NOTE, LANES, Claim, remarks, runs_past_canary
from pipemax_spark.storage.tables import Commit, DeltaTable, Transaction

ROWS = set(range(2 * LANES))


class TableInMemory:
    """A Delta table of ints, one a commit; each of its operations pauses at random."""

    name, format_name = "table", "Delta"
    takes_one_append_at_a_time = False

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._lock = threading.Lock()
        self._commits: list[tuple[str | None, str, int | None]] = [(None, "create", None)]
        """Application id, note and row of each."""
        self._last_version: dict[str, int] = {}

    def pause(self) -> None:
        with self._lock:
            pause_s = 0.004 * self._rng.random() ** 2
        time.sleep(pause_s)

    def rows(self) -> list[int]:
        with self._lock:
            return [row for _, _, row in self._commits if row is not None]

    def table_id(self) -> str:
        return "id"

    def version(self) -> int:
        self.pause()
        return len(self._commits) - 1

    def append(self, row: int | None, transaction: Transaction) -> None:
        self.pause()
        with self._lock:
            begun = len(self._commits)
            is_skipped = self._last_version.get(transaction.app_id, -1) >= transaction.version
        if is_skipped:
            return
        self.pause()
        with self._lock:
            if any(app_id == transaction.app_id for app_id, _, _ in self._commits[begun:]):
                raise CommitRefusedError("another commit of this application id landed meanwhile")
            self._last_version[transaction.app_id] = transaction.version
            self._commits.append((transaction.app_id, transaction.note, row))

    def append_nothing(self, transaction: Transaction, _schema: Any = None) -> None:
        self.append(None, transaction)

    def find_commit(self, note: str, *, since_version: int) -> Commit | None:
        self.pause()
        for version, (_, found, _) in enumerate(self._commits):
            if found == note and version > since_version:
                return Commit(version=version, rows=None, operation="WRITE", note=note)
        return None

    def notes(self, prefix: str, *, since_version: int) -> list[str]:
        self.pause()
        later = [note for _, note, _ in self._commits[since_version + 1 :]]
        return [note for note in reversed(later) if note.startswith(prefix)]

    def history(self, since_version: int) -> Iterator[Commit]:
        for version, (_, note, _) in reversed([*enumerate(self._commits)][since_version + 1 :]):
            yield Commit(version=version, rows=None, operation="WRITE", note=note)


class IcebergInMemory(TableInMemory):
    """An Iceberg table: it compares the numbers at the moment of the commit, and refuses what Delta would skip."""

    format_name = "Iceberg"

    def append(self, row: int | None, transaction: Transaction) -> None:
        self.pause()
        with self._lock:
            if self._last_version.get(transaction.app_id, -1) >= transaction.version:
                raise CommitRefusedError("the number is not above the table's")
            self._last_version[transaction.app_id] = transaction.version
            self._commits.append((transaction.app_id, transaction.note, row))


def test_a_claim_s_remark_is_read_back_and_claims_without_one_say_nothing() -> None:
    table = TableInMemory(0)
    said = ["ids; of two inputs", None, "latest", None]
    for number, remark in enumerate(said):
        claim = Claim.take(cast(DeltaTable, table), f"run{number}", remark=remark)
        table.append(number, claim.chunk(0, lane=0))
        assert claim.landed(claim.chunk(0, lane=0))
    assert [*remarks(cast(DeltaTable, table))] == ["latest", "ids; of two inputs"]
    with pytest.raises(JobFailedError, match="taken over by run run3 while"):
        Claim(table=cast(DeltaTable, table), run_id="other", epoch=1).landed(claim.chunk(1, lane=0))


def run(table: TableInMemory, run_id: str) -> bool:
    """Claim the table and commit what is left on all lanes; tell whether the run was done and not overtaken."""
    table.pause()
    try:
        claim = Claim.take(cast(DeltaTable, table), run_id, remark=f"what {run_id} says")
    except JobFailedError:
        return False
    left = sorted(ROWS - set(table.rows()))

    def commit_lane(lane: int) -> bool:
        for number in range(lane, len(left), LANES):
            transaction = claim.chunk(number, lane=lane)
            table.pause()
            try:
                table.append(left[number], transaction)
                claim.landed(transaction)
            except (CommitRefusedError, JobFailedError):
                return False
        return True

    with ThreadPoolExecutor(LANES) as lanes:
        return all(list(lanes.map(commit_lane, range(LANES))))


@pytest.mark.parametrize("kind", [TableInMemory, IcebergInMemory])
@pytest.mark.parametrize("num_runs", [2, pytest.param(3, marks=pytest.mark.long), 4])
def test_of_runs_that_claim_at_once_one_goes_on_and_each_row_is_committed_once(
    num_runs: int, kind: type[TableInMemory]
) -> None:
    for seed in range(20):
        table = kind(seed)
        with ThreadPoolExecutor(num_runs) as pool:
            is_done = list(pool.map(lambda number, table=table: run(table, f"run{number}"), range(num_runs)))
        assert any(is_done), f"seed {seed}: the runs refused each other"
        assert sorted(table.rows()) == sorted(ROWS), f"seed {seed}"


def test_a_run_that_its_canary_ended_is_none_to_compare_with_whatever_it_had_taken_over() -> None:
    class Noted:
        name = "table"

        def table_id(self) -> str:
            return "id"

        def recent_notes(self, prefix: str, *, commits: int) -> list[str]:
            return [note for note in notes if note.startswith(prefix)]

    table = cast(DeltaTable, Noted())
    claims = {run: Claim(table=table, run_id=run, epoch=1) for run in ("good", "ended", "taken-over")}
    notes = [
        claims["ended"].chunk(1, lane=0, origin=f" (slices 0 to 0){CANARY_NOTE}").note,
        claims["ended"].recovery(0, dead_run_id="dead").note,
        claims["taken-over"].reuse(0, table="earlier").note,
        claims["good"].chunk(3, lane=0, origin=" (slices 1 to 4)").note,
        claims["good"].chunk(0, lane=0, origin=f" (slices 0 to 0){CANARY_NOTE}").note,
    ]
    assert runs_past_canary(table) == ["good"]
