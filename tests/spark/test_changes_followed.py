"""Nights over a table with a change data feed: what was inserted, changed and deleted there arrives once."""

import contextlib
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipemax_spark.errors import JobError, JobFailedError, OnDelete
from pipemax_spark.job.deleted import DELETED_AT, DeletedRows
from pipemax_spark.rows.position import Positions
from pipemax_spark.storage.tables import DeltaTable
from tests.fakes.settings import expected_text
from tests.spark.conftest import Nights, words
from tests.spark.spark_work import set_to

IDS = {"id_columns": ("id",)}
SCHEMA = "id long, text string, note string"


class DiedError(RuntimeError):
    """The driver dies here."""


@pytest.fixture
def fed(nights: Nights) -> Nights:
    """Nights over an input that keeps a feed of its changes."""
    nights.sql(
        "CREATE TABLE {input} (id BIGINT, text STRING, note STRING) USING delta "
        "TBLPROPERTIES ('delta.enableChangeDataFeed' = 'true')"
    )
    return nights


def merge(nights: Nights, rows: list[tuple[Any, ...]]) -> None:
    """Update, insert and, for rows without text, delete, in one commit."""
    nights.jobs.spark.createDataFrame(rows, SCHEMA).createOrReplaceTempView("news")
    nights.sql(
        "MERGE INTO {input} AS t USING news AS s ON t.id = s.id WHEN MATCHED AND s.text IS NULL THEN DELETE "
        "WHEN MATCHED THEN UPDATE SET * WHEN NOT MATCHED AND s.text IS NOT NULL THEN INSERT *"
    )


def texts(nights: Nights) -> dict[int, str]:
    """Each id's text in the output; each id once, with the answer to its text."""
    rows = nights.jobs.rows()
    found = {row["id"]: row["text"] for row in rows}
    assert len(found) == len(rows)
    assert all(row["annotation"]["text"] == expected_text(f"Say {row['text']}", 16) for row in rows)
    return found


def versions(nights: Nights) -> int:
    return DeltaTable(nights.jobs.spark, nights.jobs.output).version()


@pytest.mark.long  # four nights; what lacks is refused in make test
def test_changed_rows_are_annotated_again_and_deleted_ones_are_kept(fed: Nights) -> None:
    fed.append([(i, text, "") for i, text in words(0, 6)], SCHEMA)
    assert fed.run(**IDS) == (6, 0, 6)
    merge(fed, [(0, "changed", ""), (1, "word 1", "another note"), (2, None, ""), (7, "new", "")])
    fed.sql("DELETE FROM {input} WHERE id = 3")
    merge(fed, [(3, "again", "")])
    fed.sql("UPDATE {input} SET id = 14 WHERE id = 4")
    fed.sql("DELETE FROM {input} WHERE id = 5")
    merge(fed, [(5, "word 5", "as before")])
    assert fed.run(**IDS) == (6, 2, 4)
    expected = {0: "changed", 1: "word 1", 2: "word 2", 3: "again", 4: "word 4", 5: "word 5", 7: "new"}
    assert texts(fed) == expected | {14: "word 4"}
    assert "2 rows, of which the input has none any more, stay in the output" in fed.jobs.printed
    before = versions(fed)
    assert fed.run(**IDS) == (0, 0, 0)
    assert versions(fed) == before, "a night without news commits nothing"


@pytest.mark.long  # four nights
def test_deleted_rows_are_removed_and_those_that_earlier_nights_kept_where_all_are_compared(
    fed: Nights,
) -> None:
    fed.append([(i, text, "") for i, text in words(0, 5)], SCHEMA)
    fed.run(**IDS)
    fed.sql("DELETE FROM {input} WHERE id = 2")
    assert fed.run(**IDS) == (0, 0, 0)
    fed.sql("DELETE FROM {input} WHERE id IN (0, 4)")
    summary = fed.jobs.run(input=fed.input, incremental=True, on_delete=OnDelete.REMOVE, **IDS)
    assert (summary.rows_deleted, summary.rows_out) == (2, 0)
    assert sorted(texts(fed)) == [1, 2, 3], "what earlier nights kept stays"
    # All rows are compared: what any earlier night has kept leaves, too.
    assert fed.run(rescan=True, on_delete=OnDelete.REMOVE, **IDS) == (2, 2, 0)
    assert sorted(texts(fed)) == [1, 3]


@pytest.mark.long  # four nights; the test above has the others
def test_deleted_rows_are_marked_and_no_longer_once_they_are_there_again(fed: Nights) -> None:
    mark = {"on_delete": OnDelete.MARK, **IDS}
    fed.append([(i, text, "") for i, text in words(0, 4)], SCHEMA)
    fed.run(**mark)
    fed.sql("DELETE FROM {input} WHERE id < 3")
    assert fed.run(**mark) == (0, 0, 0)
    marked = {row["id"]: row[DELETED_AT] for row in fed.jobs.rows()}
    assert [i for i, time in sorted(marked.items()) if time is not None] == [0, 1, 2]
    merge(fed, [(0, "word 0", ""), (1, "other", "")])
    assert fed.run(**mark) == (2, 1, 1)
    again = {row["id"]: row[DELETED_AT] for row in fed.jobs.rows()}
    assert again == {0: None, 1: None, 2: marked[2], 3: None}
    assert texts(fed) == {0: "word 0", 1: "other", 2: "word 2", 3: "word 3"}
    fed.sql("DELETE FROM {input} WHERE id = 3")
    assert fed.run(rescan=True, **mark) == (2, 2, 0)
    again = {row["id"]: row[DELETED_AT] for row in fed.jobs.rows()}
    assert (again[0], again[1], again[2]) == (None, None, marked[2])
    assert again[3] is not None


@pytest.mark.parametrize(
    ("owner", "method", "after"),
    [
        pytest.param(Positions, "write", False, marks=pytest.mark.long),
        pytest.param(Positions, "write", True, marks=pytest.mark.long),
        pytest.param(DeletedRows, "settle", True, marks=pytest.mark.long),
        pytest.param(DeltaTable, "replace", True, marks=pytest.mark.long),
    ],
)
def test_a_night_that_dies_between_two_steps_is_repaired_by_the_same_command(
    fed: Nights, monkeypatch: pytest.MonkeyPatch, owner: Any, method: str, after: bool
) -> None:
    remove = {"on_delete": OnDelete.REMOVE, **IDS}
    fed.append([(i, text, "") for i, text in words(0, 4)], SCHEMA)
    fed.run(**remove)
    merge(fed, [(0, "changed", ""), (1, None, ""), (4, "new", "")])
    with monkeypatch.context() as patch:
        die_at(patch, owner, method, after=after)
        with pytest.raises(DiedError):
            fed.run(**remove)
    fed.run(**remove)
    assert texts(fed) == {0: "changed", 2: "word 2", 3: "word 3", 4: "new"}
    assert fed.run(**remove) == (0, 0, 0)
    assert [row["rows"] for row in inserted(fed)] == [4, 2], "no row was annotated twice"


def inserted(nights: Nights) -> list[dict[str, int]]:
    """The rows that each commit has added, of those that added any."""
    history = DeltaTable(nights.jobs.spark, nights.jobs.output).history(-1)
    commits = [commit for commit in history if commit is not None and commit.rows]
    return [{"rows": commit.rows or 0} for commit in reversed(commits)]


def die_at(patch: pytest.MonkeyPatch, owner: Any, method: str, *, after: bool) -> None:
    whole = getattr(owner, method)

    def dying(*arguments: Any, **named: Any) -> Any:
        if after:
            whole(*arguments, **named)
        raise DiedError(method)

    patch.setattr(owner, method, dying)


@pytest.mark.long
def test_a_night_that_read_an_older_state_than_another_run_s_changes_nothing_of_it(
    fed: Nights, monkeypatch: pytest.MonkeyPatch
) -> None:
    fed.append([(0, "first", "")], SCHEMA)
    fed.run(**IDS)
    merge(fed, [(0, "second", "")])
    whole, directory = DeltaTable.commit_mark, fed.jobs.directory

    def overtaken(self: Any, version: int) -> Any:  # by a run that reads, and annotates, a later state
        monkeypatch.setattr(DeltaTable, "commit_mark", whole)
        merge(fed, [(0, "third", "")])
        fed.run(work_dir=str(directory / "another"), **IDS)
        return whole(self, version)

    monkeypatch.setattr(DeltaTable, "commit_mark", overtaken)
    with pytest.raises(JobFailedError, match=r"has committed to .* since this run has read what changed"):
        fed.run(work_dir=str(directory / "one"), **IDS)
    assert texts(fed) == {0: "third"}
    fed.run(work_dir=str(directory / "one"), **IDS)
    assert texts(fed) == {0: "third"}


def vacuumed(nights: Nights) -> None:
    with set_to(nights.jobs.spark, {"spark.databricks.delta.retentionDurationCheck.enabled": "false"}):
        nights.sql("VACUUM {input} RETAIN 0 HOURS")


def log_cleaned(nights: Nights) -> None:
    nights.sql("ALTER TABLE {input} SET TBLPROPERTIES ('delta.checkpointInterval' = '1')")
    nights.append([(9, "nine", "")], SCHEMA)
    for version in range(3):
        for file in Path(nights.input, "_delta_log").glob(f"*{version:020}.*"):
            if "checkpoint" not in file.name:
                file.unlink()


def switched_off_meanwhile(nights: Nights) -> None:
    nights.sql("ALTER TABLE {input} SET TBLPROPERTIES ('delta.enableChangeDataFeed' = 'false')")
    merge(nights, [(1, "changed without a feed", "")])
    nights.sql("ALTER TABLE {input} SET TBLPROPERTIES ('delta.enableChangeDataFeed' = 'true')")


@pytest.mark.long  # three nights each
@pytest.mark.parametrize("history", [vacuumed, log_cleaned, switched_off_meanwhile])
def test_where_the_feed_does_not_reach_back_all_rows_are_compared(
    fed: Nights, history: Callable[[Nights], None]
) -> None:
    remove = {"on_delete": OnDelete.REMOVE, **IDS}
    fed.append([(i, text, "") for i, text in words(0, 4)], SCHEMA)
    fed.run(**remove)
    merge(fed, [(0, "changed", ""), (3, None, ""), (5, "new", "")])
    history(fed)
    fed.run(**remove)
    assert "cannot be read, so all of its rows are compared with the output" in fed.jobs.printed
    rows = fed.jobs.spark.read.format("delta").load(fed.input).collect()
    assert texts(fed) == {row["id"]: row["text"] for row in rows}
    assert fed.run(**remove) == (0, 0, 0)


def test_what_a_job_lacks_to_follow_changes_is_said_by_name(fed: Nights) -> None:
    with pytest.raises(JobError, match="--on-delete remove needs --id-columns"):
        fed.run(on_delete=OnDelete.REMOVE)
    with pytest.raises(JobError, match="--on-delete says how --incremental reads"):
        fed.run(on_delete=OnDelete.REMOVE, incremental=False, **IDS)
    with pytest.raises(JobError, match="needs --select with the columns of the prompt"):
        fed.run(on_delete=OnDelete.MARK, select=("id",), **IDS)
    fed.sql("ALTER TABLE {input} SET TBLPROPERTIES ('delta.enableChangeDataFeed' = 'false')")
    with pytest.raises(JobError, match="needs an input with the table property"):
        fed.run(on_delete=OnDelete.MARK, **IDS)


def a_step(draw: random.Random, rows: dict[int, str]) -> Callable[[Nights], None]:
    """Change the model ``rows``, and return the same change of the input."""
    ids = draw.sample(range(8), draw.randint(1, 4))
    text = f"text {draw.randrange(3)}"
    match draw.choice(["merge", "update", "delete", "overwrite", "restore", "optimize"]):
        case "merge":
            news = [(i, draw.choice([None, text, "same"]), "") for i in ids]
            for i, new, _ in news:
                if new is None:
                    rows.pop(i, None)
                else:
                    rows[i] = new
            return lambda nights: merge(nights, news)
        case "update":
            rows.update({i: text for i in ids if i in rows})
            where = ", ".join(map(str, ids))
            return lambda nights: nights.sql(f"UPDATE {{input}} SET text = '{text}' WHERE id IN ({where})")
        case "delete":
            for i in ids:
                rows.pop(i, None)
            where = ", ".join(map(str, ids))
            return lambda nights: nights.sql(f"DELETE FROM {{input}} WHERE id IN ({where})")
        case "overwrite":
            rows.clear()
            rows.update(dict.fromkeys(ids, text))
            values = [(i, text, "") for i in ids]
            return lambda nights: (
                nights.jobs.spark.createDataFrame(values, SCHEMA)
                .write.format("delta")
                .mode("overwrite")
                .save(nights.input)
            )
        case "restore":
            rows.clear()
            return lambda nights: nights.sql("RESTORE TABLE {input} TO VERSION AS OF 0")
        case _:
            return lambda nights: nights.sql("OPTIMIZE {input}")


@pytest.mark.long
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("on_delete", [OnDelete.KEEP, OnDelete.REMOVE])
def test_after_random_changes_the_output_is_what_the_input_is(
    fed: Nights, monkeypatch: pytest.MonkeyPatch, seed: int, on_delete: OnDelete
) -> None:
    draw, rows, expected = random.Random(seed), dict[int, str](), dict[int, str]()
    for _ in range(4):
        for _ in range(draw.randint(1, 3)):
            a_step(draw, rows)(fed)
        dies = draw.choice([None, (Positions, "write"), (DeltaTable, "replace"), (DeltaTable, "append")])
        if dies is not None:
            with monkeypatch.context() as patch:
                die_at(patch, *dies, after=draw.random() < 0.5)
                with contextlib.suppress(DiedError, JobFailedError):
                    fed.run(on_delete=on_delete, **IDS)
        fed.run(on_delete=on_delete, rescan=draw.random() < 0.2, **IDS)
        expected = dict(rows) if on_delete is OnDelete.REMOVE else expected | rows
        assert texts(fed) == expected
