"""``--new-spec replace`` on Iceberg: a reader sees each row once in every snapshot."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from pipemax_spark.errors import JobFailedError, NewSpec
from pipemax_spark.request.prompts import PromptSource
from pipemax_spark.storage.iceberg import IcebergTable
from tests.fakes.settings import expected_text
from tests.spark.iceberg.conftest import IcebergJobs
from tests.spark.iceberg.test_iceberg_jobs import die, interrupted

pytestmark = pytest.mark.iceberg

REPLACE: dict[str, Any] = {"source": PromptSource(template="Shout {text}"), "new_spec": NewSpec.REPLACE}


def rows_by_snapshot(run: IcebergJobs, since: int) -> Iterator[Counter[tuple[int, str]]]:
    """The rows of every snapshot of the main branch from the sequence number ``since`` on."""
    table = IcebergTable(run.spark, run.output)
    for commit in table.history(since - 1):
        assert commit is not None
        rows = table.read(version=commit.version).select("id", "text").collect()
        yield Counter((row["id"], row["text"]) for row in rows)


def check_answers(run: IcebergJobs, rows: list[tuple[int, str]]) -> None:
    assert Counter((row["id"], row["text"]) for row in run.rows()) == Counter(rows)
    assert all(row["annotation"]["text"] == expected_text(f"Shout {row['text']}", 16) for row in run.rows())


@pytest.mark.parametrize("id_columns", [("id",), ()], ids=["ids", "no ids"])
def test_each_old_row_leaves_with_its_new_answer_over_a_death_and_a_second_run(
    run: IcebergJobs, id_columns: tuple[str, ...]
) -> None:
    rows = [(1, "a"), (2, "b"), (3, "c")] if id_columns else [(1, "a"), (1, "a"), (1, "a"), (2, "b")]
    run.write_input(rows)
    run.run(id_columns=id_columns)
    first = IcebergTable(run.spark, run.output).version()
    run.run(id_columns=id_columns, **REPLACE, limit=1)
    with pytest.raises(RuntimeError, match="the run dies"):
        interrupted(run, die, id_columns=id_columns, **REPLACE, limit=1)

    def overtake() -> None:
        run.run(id_columns=id_columns, work_dir=str(run.directory / "other"), **REPLACE)

    work_dir = str(run.directory / "one")
    with pytest.raises(JobFailedError, match="was taken over by run"):
        interrupted(run, overtake, id_columns=id_columns, work_dir=work_dir, **REPLACE)
    check_answers(run, rows)
    snapshots = [*rows_by_snapshot(run, first)]
    assert len(snapshots) > 1
    assert all(snapshot == Counter(rows) for snapshot in snapshots)


def test_stacked_rows_are_unstacked_in_one_snapshot_though_nothing_is_left(run: IcebergJobs) -> None:
    rows = [(1, "a"), (2, "b")]
    run.write_input(rows)
    run.run(id_columns=("id",))
    run.run(id_columns=("id",), **{**REPLACE, "new_spec": NewSpec.STACK})
    assert len(run.rows()) == 4
    assert run.run(id_columns=("id",), **REPLACE).rows_out == 0
    check_answers(run, rows)
