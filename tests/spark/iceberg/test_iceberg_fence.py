"""Which run may commit to an Iceberg table: through real Spark and Iceberg, with commits held up in their midst."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from pipemax_spark.errors import CommitRefusedError, JobFailedError
from pipemax_spark.storage.fence import LANES, Claim
from pipemax_spark.storage.iceberg import IcebergTable
from pipemax_spark.storage.iceberg_commits import commit_fenced
from pipemax_spark.storage.tables import KEY, Replaced
from tests.spark.iceberg.conftest import SCHEMA
from tests.spark.test_fence import HeldRows, held_up

pytestmark = [pytest.mark.iceberg, pytest.mark.all_lanes]


def ids(table: IcebergTable) -> list[int]:
    return sorted(row["id"] for row in table.read().collect())


def rows_of(spark: Any, *numbers: int) -> Any:
    return spark.createDataFrame([(number, "run") for number in numbers], SCHEMA)


def branches(table: IcebergTable) -> set[str]:
    return {str(name) for name in table._catalog.load().refs().keySet()}


def compact(table: IcebergTable) -> None:
    table.compact()


def append_elsewhere(table: IcebergTable) -> None:
    spark = table.read().sparkSession
    rows_of(spark, 100).writeTo(table.sql_name).append()


def set_property(table: IcebergTable) -> None:
    table.set_properties({"a": "b"})


def add_column(table: IcebergTable) -> None:
    table.read().sparkSession.sql(f"ALTER TABLE {table.sql_name} ADD COLUMN more int")


def test_an_overtaken_run_s_later_commit_is_refused_and_the_error_names_the_other_run(
    spark: Any, table: IcebergTable
) -> None:
    stale, current = Claim.take(table, "stale"), Claim.take(table, "current")
    for lane in range(LANES):
        transaction = stale.chunk(lane, lane=lane)
        table.append(rows_of(spark, lane), transaction)
    with pytest.raises(JobFailedError, match="was taken over by run current while this run, stale"):
        stale.landed(transaction)
    assert ids(table) == []
    transaction = current.chunk(0, lane=0)
    table.append(rows_of(spark, 7), transaction)
    assert current.landed(transaction, expected_rows=1).rows == 1
    assert ids(table) == [7]
    assert branches(table) == {"main"}


def test_a_commit_that_is_under_way_when_another_run_claims_the_table_is_refused(
    spark: Any, table: IcebergTable, tmp_path: Path
) -> None:
    stale = Claim.take(table, "stale")
    held = HeldRows(spark, tmp_path / "held", [(1, "stale")])
    with held_up(held, table.append, held.rows, stale.chunk(0, lane=LANES - 1)) as append:
        Claim.take(table, "current")
    with pytest.raises(CommitRefusedError):
        append.result()
    assert ids(table) == []
    Claim.take(table, "third")
    assert branches(table) == {"main"}


def test_a_claim_between_iceberg_s_validation_and_its_compare_and_set_is_noticed(
    spark: Any, table: IcebergTable
) -> None:
    """The commit is prepared for a state of the table that the claim replaces before the catalog is asked."""
    stale = Claim.take(table, "stale")
    claims: list[Claim] = []

    def begin(pending: Any) -> Any:
        if not claims:
            claims.append(Claim.take(IcebergTable(spark, table.name), "current"))
        return pending.newAppend()

    transaction = stale.chunk(0, lane=0)
    with pytest.raises(CommitRefusedError, match="is not above"):
        commit_fenced(table._catalog.load, transaction, begin=begin, summary={})
    assert table.find_commit(transaction.note, since_version=0) is None


def test_a_commit_that_is_repeated_because_its_outcome_is_unknown_adds_nothing(
    spark: Any, table: IcebergTable
) -> None:
    claim = Claim.take(table, "run")
    transaction = claim.chunk(0, lane=0)
    for _ in range(2):
        table.append(rows_of(spark, 1, 2), transaction)
        assert claim.landed(transaction, expected_rows=2).rows == 2
    # Also if it is repeated where the table is not looked at first.
    table._commit(transaction, None)
    assert ids(table) == [1, 2]


@pytest.mark.parametrize("foreign", [compact, append_elsewhere, set_property, add_column])
def test_another_writer_s_commit_in_the_midst_of_a_chunk_s_loses_neither(
    spark: Any, table: IcebergTable, tmp_path: Path, foreign: Callable[[IcebergTable], None]
) -> None:
    append_elsewhere(table)
    append_elsewhere(table)
    claim = Claim.take(table, "run")
    held = HeldRows(spark, tmp_path / "held", [(1, "run")])
    transaction = claim.chunk(0, lane=0)
    with held_up(held, table.append, held.rows, transaction) as append:
        foreign(table)
    append.result()
    assert claim.landed(transaction, expected_rows=1)
    extra = [100] if foreign is append_elsewhere else []
    assert ids(table) == [1, 100, 100, *extra]


def test_one_of_two_runs_that_claim_at_once_is_refused(spark: Any, table: IcebergTable) -> None:
    def take(run_id: str) -> Claim | str:
        try:
            return Claim.take(IcebergTable(spark, table.name), run_id)
        except JobFailedError as error:
            return str(error)

    with ThreadPoolExecutor(2) as pool:
        taken = list(pool.map(take, ["one", "two"]))
    claims = [claim for claim in taken if isinstance(claim, Claim)]
    last = max(claims, key=lambda claim: claim.epoch)
    transaction = last.chunk(0, lane=3)
    table.append(rows_of(spark, 5), transaction)
    assert last.landed(transaction, expected_rows=1)
    for claim in claims:
        if claim is not last:
            table.append(rows_of(spark, 6), claim.chunk(0, lane=2))
    assert ids(table) == [5]


def test_expired_snapshots_neither_open_the_fence_nor_lose_a_row(spark: Any, table: IcebergTable) -> None:
    stale = Claim.take(table, "stale")
    current = Claim.take(table, "current")
    table.append(rows_of(spark, 1), current.chunk(0, lane=0))
    append_elsewhere(table)
    spark.sql(
        f"CALL {table.name.split('.')[0]}.system.expire_snapshots("
        "table => 'db.answers', older_than => TIMESTAMP '2099-01-01 00:00:00', retain_last => 1)"
    )
    assert table.commits_since(0) is None, "the history is no longer whole"
    table.append(rows_of(spark, 2), stale.chunk(0, lane=0))
    with pytest.raises(CommitRefusedError):
        table._commit(stale.chunk(1, lane=0), None)
    assert ids(table) == [1, 100]


def replace_id(spark: Any, table: IcebergTable, number: int, rows: Any, transaction: Any) -> None:
    replaced = Replaced(
        keys=spark.createDataFrame([(str(number),)], f"{KEY} string"),
        key="cast(t.id AS string)",
        condition="t.run = 'run'",
    )
    table.replace(table.session_for_replacing(), rows, replaced, transaction)


def test_replaced_rows_leave_in_the_snapshot_that_brings_the_new_ones(
    spark: Any, table: IcebergTable
) -> None:
    claim = Claim.take(table, "run")
    table.append(rows_of(spark, 1, 2), claim.chunk(0, lane=0))
    before = table.version()
    transaction = claim.chunk(1, lane=0)
    replace_id(spark, table, 2, spark.createDataFrame([(2, "new"), (3, "new")], SCHEMA), transaction)
    assert claim.landed(transaction, expected_rows=2).operation == "overwrite"
    assert sorted(map(tuple, table.read().collect())) == [(1, "run"), (2, "new"), (3, "new")]
    assert [commit.note for commit in table.commits_since(before) or []] == [transaction.note]


def test_a_replacing_commit_of_an_overtaken_run_is_refused(
    spark: Any, table: IcebergTable, tmp_path: Path
) -> None:
    stale = Claim.take(table, "stale")
    table.append(rows_of(spark, 1), stale.chunk(0, lane=0))
    held = HeldRows(spark, tmp_path / "held", [(1, "stale")])
    with held_up(held, replace_id, spark, table, 1, held.rows, stale.chunk(1, lane=0)) as replacing:
        Claim.take(table, "current")
    with pytest.raises(CommitRefusedError):
        replacing.result()
    assert [tuple(row) for row in table.read().collect()] == [(1, "run")]


def test_a_replacing_commit_is_done_again_when_its_files_were_compacted_meanwhile(
    spark: Any, table: IcebergTable, tmp_path: Path
) -> None:
    claim = Claim.take(table, "run")
    table.append(rows_of(spark, 1, 2), claim.chunk(0, lane=0))
    append_elsewhere(table)
    held = HeldRows(spark, tmp_path / "held", [(1, "new")])
    transaction = claim.chunk(1, lane=0)
    with held_up(held, replace_id, spark, table, 1, held.rows, transaction) as replacing:
        assert table.compact() != (0, 0)
    replacing.result()
    assert claim.landed(transaction, expected_rows=1)
    assert sorted(map(tuple, table.read().collect())) == [(1, "new"), (2, "run"), (100, "run")]
