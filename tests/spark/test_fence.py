"""Which run may commit: through real Spark and Delta, with commits held up in their midst."""

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from pipemax_spark.errors import CommitRefusedError, JobFailedError
from pipemax_spark.storage.fence import LANES, Claim
from pipemax_spark.storage.tables import Commit, DeltaTable, Transaction
from tests.waiting import wait_until

SCHEMA = "id long, run string"


class HeldRows:
    """A DataFrame whose tasks wait until it is released: its commit has begun, and cannot end."""

    def __init__(self, spark: Any, directory: Path, rows: list[tuple[int, str]]) -> None:
        self._begun, self._released = directory / "begun", directory / "released"
        directory.mkdir()
        begun, released = str(self._begun), str(self._released)

        def hold(batches: Iterator[Any]) -> Iterator[Any]:
            import time
            from pathlib import Path

            Path(begun).touch()
            while not Path(released).exists():
                time.sleep(0.02)
            yield from batches

        self.rows = spark.createDataFrame(rows, SCHEMA).coalesce(1).mapInArrow(hold, SCHEMA)

    def wait_until_begun(self) -> None:
        wait_until(self._begun.exists, 120, "the commit begins")

    def release(self) -> None:
        self._released.touch()


@pytest.fixture
def table(spark: Any, tmp_path: Path) -> DeltaTable:
    made = DeltaTable(spark, str(tmp_path / "out"))
    made.create(spark.createDataFrame([], SCHEMA).schema)
    return made


def ids(table: DeltaTable) -> list[int]:
    return sorted(row["id"] for row in table.read().collect())


@contextlib.contextmanager
def held_up(held: HeldRows, commit: Callable[..., None], *arguments: Any) -> Iterator[Future[None]]:
    """A commit of these rows that has begun and waits; it goes on at the end of the block."""
    with ThreadPoolExecutor(1) as pool:
        under_way = pool.submit(commit, *arguments)
        try:
            held.wait_until_begun()
            yield under_way
        finally:
            held.release()


@pytest.mark.all_lanes
def test_an_overtaken_run_s_later_commit_is_refused_and_the_error_names_the_other_run(
    spark: Any, table: DeltaTable
) -> None:
    stale, current = Claim.take(table, "stale"), Claim.take(table, "current")
    for lane in range(LANES):
        transaction = stale.chunk(lane, lane=lane)
        table.append(spark.createDataFrame([(lane, "stale")], SCHEMA), transaction)
    with pytest.raises(JobFailedError, match="was taken over by run current while this run, stale"):
        stale.landed(transaction)
    assert ids(table) == []
    transaction = current.chunk(0, lane=0)
    table.append(spark.createDataFrame([(7, "current")], SCHEMA), transaction)
    assert current.landed(transaction, expected_rows=1).rows == 1
    assert ids(table) == [7]


@pytest.mark.all_lanes
def test_commits_that_are_under_way_when_another_run_claims_the_table_are_refused(
    spark: Any, table: DeltaTable, tmp_path: Path
) -> None:
    """Under the lane that is claimed first, and under one of those that are claimed together."""
    stale = Claim.take(table, "stale")
    transactions = [stale.chunk(number, lane=lane) for number, lane in enumerate((0, LANES - 1))]
    held = [HeldRows(spark, tmp_path / f"held-{number}", [(number, "stale")]) for number in range(2)]
    with (
        held_up(held[0], table.append, held[0].rows, transactions[0]) as first,
        held_up(held[1], table.append, held[1].rows, transactions[1]) as last,
    ):
        Claim.take(table, "current")
    for append, transaction in zip((first, last), transactions, strict=True):
        with pytest.raises(CommitRefusedError):
            append.result()
        with pytest.raises(JobFailedError, match="was taken over by run current"):
            stale.landed(transaction)
    assert ids(table) == []


@pytest.mark.long  # tests/unit/spark/test_claims.py has the rules
def test_a_merge_of_an_overtaken_run_is_refused_like_an_append(
    spark: Any, table: DeltaTable, tmp_path: Path
) -> None:
    stale, session = Claim.take(table, "stale"), spark.newSession()
    clauses = "USING merged AS s ON s.id = t.id WHEN MATCHED THEN DELETE WHEN NOT MATCHED THEN INSERT *"
    first = stale.chunk(0, lane=0)
    session.createDataFrame([(1, "stale")], SCHEMA).createOrReplaceTempView("merged")
    table.merge(session, clauses, first)
    assert stale.landed(first, expected_rows=1)
    held = HeldRows(session, tmp_path / "held", [(1, "stale"), (2, "stale")])
    held.rows.createOrReplaceTempView("merged")
    with held_up(held, table.merge, session, clauses, stale.chunk(1, lane=0)) as merge:
        Claim.take(table, "current")
    with pytest.raises(CommitRefusedError):
        merge.result()
    later = stale.chunk(2, lane=1)
    table.merge(session, clauses, later)
    with pytest.raises(JobFailedError, match="was taken over by run current"):
        stale.landed(later)
    assert ids(table) == [1]


class OvertakenTable(DeltaTable):
    """Another run claims the table once the first of its lanes is claimed."""

    def __init__(self, spark: Any, name: str, claim: Callable[[], None]) -> None:
        super().__init__(spark, name)
        self._claim: Callable[[], None] | None = claim

    def find_commit(self, note: str, *, since_version: int) -> Commit | None:
        claim, self._claim = self._claim, None
        if claim is not None:
            claim()
        return super().find_commit(note, since_version=since_version)


@pytest.mark.long  # tests/unit/spark/test_claims.py has the rules
@pytest.mark.all_lanes
def test_a_run_that_is_overtaken_between_its_lanes_is_refused_and_the_other_has_them_all(
    spark: Any, table: DeltaTable
) -> None:
    claims: list[Claim] = []
    overtaken = OvertakenTable(spark, table.name, lambda: claims.append(Claim.take(table, "second")))
    with pytest.raises(JobFailedError, match="was taken over by run second while this run, first"):
        Claim.take(overtaken, "first")
    [second] = claims
    for lane in range(LANES):
        table.append(spark.createDataFrame([(lane, "second")], SCHEMA), second.chunk(lane, lane=lane))
    assert ids(table) == list(range(LANES))


class BusyTable(DeltaTable):
    """Another run commits a chunk while a lane of it is being claimed."""

    def __init__(self, spark: Any, name: str, commit_chunk: Callable[[], None], directory: Path) -> None:
        super().__init__(spark, name)
        self._commit_chunk: Callable[[], None] | None = commit_chunk
        self._directory = directory
        self._spark_session = spark

    def append(self, rows: Any, transaction: Transaction) -> None:
        commit_chunk, self._commit_chunk = self._commit_chunk, None
        if commit_chunk is None:
            super().append(rows, transaction)
            return
        held = HeldRows(self._spark_session, self._directory, [])
        with held_up(held, super().append, held.rows, transaction) as claim:
            commit_chunk()
        claim.result()


@pytest.mark.long  # tests/unit/spark/test_claims.py has the rules
def test_a_claim_is_retried_when_a_chunk_of_the_other_run_lands_during_it(
    spark: Any, table: DeltaTable, tmp_path: Path
) -> None:
    first = Claim.take(table, "first")
    chunk = first.chunk(0, lane=0)
    rows = spark.createDataFrame([(1, "first")], SCHEMA)
    busy = BusyTable(spark, table.name, lambda: table.append(rows, chunk), tmp_path / "held")
    second = Claim.take(busy, "second")
    assert first.landed(chunk, expected_rows=1), "it came first"
    late = first.chunk(1, lane=0)
    table.append(rows, late)
    with pytest.raises(JobFailedError, match="was taken over by run second"):
        first.landed(late)
    transaction = second.chunk(0, lane=1)
    table.append(spark.createDataFrame([(2, "second")], SCHEMA), transaction)
    assert second.landed(transaction, expected_rows=1)
    assert ids(table) == [1, 2]


def optimize(table: DeltaTable) -> None:
    table.read().sparkSession.sql(f"OPTIMIZE {table.sql_name}")


def vacuum(table: DeltaTable) -> None:
    table.read().sparkSession.sql(f"VACUUM {table.sql_name}")


def append_elsewhere(table: DeltaTable) -> None:
    table.read().sparkSession.createDataFrame([(99, "somebody")], SCHEMA).write.format("delta").mode(
        "append"
    ).save(table.name)


def set_property(table: DeltaTable) -> None:
    table.set_properties({"somebody": "else"})


def add_column(table: DeltaTable) -> None:
    table.read().sparkSession.sql(f"ALTER TABLE {table.sql_name} ADD COLUMN remark string")


@pytest.mark.long  # tests/unit/spark/test_claims.py has the rules
def test_another_writer_s_commit_during_ours_loses_no_row(
    spark: Any, table: DeltaTable, tmp_path: Path
) -> None:
    claim = Claim.take(table, "run")
    table.append(spark.createDataFrame([(1, "run")], SCHEMA), claim.chunk(0, lane=0))
    expected = [1]
    foreign_commits = (append_elsewhere, set_property, add_column, optimize, vacuum)
    for number, foreign in enumerate(foreign_commits, 1):
        rows = [(10 * number, "run"), (10 * number + 1, "run")]
        held = HeldRows(spark, tmp_path / foreign.__name__, rows)
        chunk = claim.chunk(number, lane=0)
        with held_up(held, table.append, held.rows, chunk) as append:
            foreign(table)
        append.result()
        assert claim.landed(chunk, expected_rows=2).rows == 2, foreign.__name__
        expected += [row for row, _ in rows]
        assert [row for row in ids(table) if row != 99] == expected, foreign.__name__


@pytest.mark.all_lanes
def test_one_of_two_runs_that_claim_at_once_is_refused(spark: Any, table: DeltaTable) -> None:
    with ThreadPoolExecutor(3) as pool:
        futures = [pool.submit(Claim.take, table, f"run{number}") for number in range(3)]
        refusals = [future.exception() for future in futures]
    assert refusals.count(None) >= 1
    assert all(isinstance(refusal, JobFailedError) for refusal in refusals if refusal is not None)
    claims = [future.result() for future in futures if future.exception() is None]
    latest = max(claims, key=lambda claim: claim.epoch)
    for claim in claims:
        transaction = claim.chunk(0, lane=0)
        table.append(spark.createDataFrame([(claim.epoch, claim.run_id)], SCHEMA), transaction)
    assert ids(table) == [latest.epoch]


def test_a_commit_behind_many_others_is_found_and_one_with_other_rows_ends_the_run(
    spark: Any, table: DeltaTable
) -> None:
    claim = Claim.take(table, "run")
    transaction = claim.chunk(0, lane=0)
    table.append(spark.createDataFrame([(1, "run"), (2, "run")], SCHEMA), transaction)
    with pytest.raises(JobFailedError, match=r"was to add 3 rows and added 2 \(-1; version"):
        claim.landed(transaction, expected_rows=3)
    for number in range(17):
        set_property_to(table, number)
    assert claim.landed(transaction, expected_rows=2).version < table.version() - 16


def set_property_to(table: DeltaTable, number: int) -> None:
    table.set_properties({"somebody": str(number)})


def test_a_claim_changes_no_metadata(spark: Any, table: DeltaTable) -> None:
    Claim.take(table, "run")
    history = spark.sql(f"DESCRIBE HISTORY {table.sql_name} LIMIT 2").collect()
    assert {row["operation"] for row in history} == {"WRITE"}
    log = Path(table.name, "_delta_log")
    claims = [path.read_text() for path in sorted(log.glob("*.json"))[-2:]]
    assert all('"metaData"' not in text and '"txn"' in text for text in claims)
