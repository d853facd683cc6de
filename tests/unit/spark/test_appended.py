"""Which files were appended between two versions of a Delta table, by the lines of its log."""

import pytest

from pipemax_spark.storage.appended import Action, AppendedFiles, appended_by


def add(version: int, name: str, rows: int | None = 10, **facts: bool) -> Action:
    return Action(version=version, added=name, rows=rows, **facts)


def remove(version: int, name: str, **facts: bool) -> Action:
    return Action(version=version, removed=name, **facts)


def files(version: int, *names: str) -> AppendedFiles:
    return AppendedFiles(version=version, names=frozenset(names), rows=10 * len(names))


def test_files_of_appends_are_found_in_the_last_version() -> None:
    actions = [Action(version=6), add(6, "a"), add(8, "b"), add(8, "c")]
    assert appended_by(actions, until=9) == [files(9, "a", "b", "c")]
    assert appended_by([Action(version=6)], until=6) == []


def test_files_that_were_joined_with_others_are_found_before_that() -> None:
    joined = [add(7, "joined", keeps_rows=True), remove(7, "a", keeps_rows=True)]
    actions = [add(5, "a"), add(6, "b"), *joined, remove(7, "old", keeps_rows=True), add(8, "c")]
    assert appended_by(actions, until=9) == [files(6, "a", "b"), files(9, "c")]


def test_joining_other_files_changes_nothing() -> None:
    actions = [add(5, "a"), remove(6, "old", keeps_rows=True), add(6, "joined", keeps_rows=True), add(7, "b")]
    assert appended_by(actions, until=7) == [files(7, "a", "b")]


@pytest.mark.parametrize(
    "action",
    [
        remove(6, "old"),
        add(6, "uncounted", None),
        add(6, "a"),
        Action(version=6, may_rename=True),
    ],
)
def test_nothing_is_said_after_any_other_change(action: Action) -> None:
    assert appended_by([add(5, "a"), action, add(7, "b")], until=7) is None
