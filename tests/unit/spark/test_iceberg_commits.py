"""Fenced commits against Iceberg's transaction rules in memory; real Iceberg is in ``tests/spark/iceberg``."""

from collections.abc import Callable
from typing import Any

import pytest
from pyspark.sql.types import ArrayType, IntegerType, LongType, StringType, StructType

from pipemax_spark.errors import CommitRefusedError, JobError
from pipemax_spark.storage.iceberg_catalog import missing_columns
from pipemax_spark.storage.iceberg_commits import NOTE, NUMBER_PROPERTY, CommitValidator, commit_fenced
from pipemax_spark.storage.tables import Transaction


class Lake:
    """An Iceberg table: its states, of which each commit replaces the last one or fails."""

    def __init__(self) -> None:
        self.states: list[tuple[dict[str, str], list[dict[str, str]]]] = [({}, [])]
        """Properties and the summaries of snapshots."""
        self.lost_races = 0
        """So many commits are told that others were faster."""

    def load(self) -> "Lake":
        return self

    def newTransaction(self) -> "Pending":  # noqa: N802
        return Pending(self)

    @property
    def notes(self) -> list[str]:
        return [summary[NOTE] for summary in self.states[-1][1]]


class Pending:
    """An Iceberg transaction: its updates are applied again if the table has changed at the commit."""

    def __init__(self, lake: Lake) -> None:
        self._lake = lake
        self._updates: list[Callable[[], None]] = []
        self._begin()

    def _begin(self) -> None:
        self._base = len(self._lake.states)
        self._properties, self._snapshots = {**self._lake.states[-1][0]}, [*self._lake.states[-1][1]]

    def table(self) -> Any:
        return self

    def properties(self) -> dict[str, str]:
        return self._properties

    def newAppend(self) -> "Update":  # noqa: N802
        return Update(self)

    updateProperties = newAppend  # noqa: N815

    def apply(self, update: Callable[[], None]) -> None:
        self._updates.append(update)
        update()

    def add(self, summary: dict[str, str]) -> None:
        self._snapshots.append(summary)

    def commitTransaction(self) -> None:  # noqa: N802
        if len(self._lake.states) != self._base:
            self._begin()
            for update in self._updates:
                update()
        if self._lake.lost_races:
            self._lake.lost_races -= 1
            raise RuntimeError("org.apache.iceberg.exceptions.CommitFailedException: others were faster")
        self._lake.states.append((self._properties, self._snapshots))


class Update:
    """A snapshot to come, which a fence validates, or table properties to come."""

    def __init__(self, pending: Pending) -> None:
        self._pending = pending
        self._values: dict[str, str] = {}
        self._fence: CommitValidator | None = None

    def set(self, name: str, value: str) -> "Update":
        self._values[name] = value
        return self

    def validateWith(self, fence: CommitValidator) -> None:  # noqa: N802
        self._fence = fence

    def commit(self) -> None:
        self._pending.apply(self._apply)

    def _apply(self) -> None:
        if self._fence is None:
            self._pending.properties().update(self._values)
            return
        if not self._fence.validate(None):
            raise RuntimeError(f"ValidationException: {self._fence.errorMessage()}")
        self._pending.add(self._values)


def commit(lake: Lake, version: int, note: str, *, before_commit: Callable[[], None] = lambda: None) -> None:
    def begin(pending: Any) -> Any:
        before_commit()
        return pending.newAppend()

    transaction = Transaction(app_id="lane", version=version, note=note)
    commit_fenced(lake.load, transaction, begin=begin, summary={}, pause_s=0.0)


def test_a_commit_sets_its_number_and_one_with_a_number_that_is_not_above_it_is_refused() -> None:
    lake = Lake()
    commit(lake, 5, "first")
    assert lake.states[-1][0] == {f"{NUMBER_PROPERTY}lane": "5"}
    for version in (4, 5):
        with pytest.raises(CommitRefusedError, match="is not above 5"):
            commit(lake, version, "late")
    commit(lake, 6, "next")
    assert lake.notes == ["first", "next"]


def test_a_claim_that_lands_after_the_validation_is_noticed_by_the_second_one() -> None:
    lake = Lake()
    with pytest.raises(CommitRefusedError, match="number 4 of lane is not above 9"):
        commit(lake, 4, "stale", before_commit=lambda: commit(lake, 9, "claim"))
    assert lake.notes == ["claim"]


def test_a_commit_that_others_outrun_is_tried_again_and_given_up_in_the_end() -> None:
    lake = Lake()
    lake.lost_races = 2
    commit(lake, 1, "patient")
    assert lake.notes == ["patient"]
    lake.lost_races = 99
    with pytest.raises(RuntimeError, match="CommitFailedException"):
        commit(lake, 2, "hopeless")
    assert lake.notes == ["patient"]


def test_missing_columns_are_found_within_structs_and_refused_within_arrays() -> None:
    inner = StructType().add("text", StringType())
    known = StructType().add("id", LongType()).add("annotation", inner)
    needed = (
        StructType()
        .add("ID", LongType())
        .add("annotation", StructType().add("text", StringType()).add("tokens", IntegerType()))
        .add("day", StringType())
    )
    assert missing_columns(needed, known) == [
        (("annotation", "tokens"), IntegerType()),
        (("day",), StringType()),
    ]
    items = StructType().add("items", ArrayType(inner))
    with pytest.raises(JobError, match="name another output"):
        missing_columns(StructType().add("items", ArrayType(StringType())), items)
