"""``--new-spec replace``: each old row leaves in the commit that brings its row's new answer."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import reduce
from typing import Any

import pytest
from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812

from pipemax_spark.errors import JobError, JobFailedError, NewSpec
from pipemax_spark.request.prompts import PromptSource
from pipemax_spark.storage.fence import is_claim
from pipemax_spark.storage.tables import DeltaTable, Replaced, Transaction
from tests.fakes.settings import expected_text
from tests.spark.conftest import Jobs, Nights
from tests.spark.test_killed_job import committed_chunks, kill_when, start_job

ROWS = [(i, f"word {i}") for i in range(30)]
IDS: dict[str, Any] = {"id_columns": ("id",)}
SHOUT: dict[str, Any] = {"source": PromptSource(template="Shout {text}")}
REPLACE: dict[str, Any] = {"new_spec": NewSpec.REPLACE}


def prompts(run: Jobs) -> Counter[tuple[int, str]]:
    """Each row's id with the template that answered it."""
    found = Counter[tuple[int, str]]()
    for row in run.rows():
        text = row["annotation"]["text"]
        (used,) = [name for name in ("Say", "Shout") if text == expected_text(f"{name} {row['text']}", 16)]
        found[row["id"], used] += 1
    return found


def all_by(template: str, rows: list[tuple[int, str]]) -> Counter[tuple[int, str]]:
    return Counter((number, template) for number, _ in rows)


def ids_by_version(run: Jobs, since: int = 0) -> list[Counter[int]]:
    """The ids of every version of the table from ``since`` on, as a reader could have seen them.

    A claim changes no row.
    """
    table = DeltaTable(run.spark, run.output)
    versions = [commit.version for commit in table.history(since - 1) if commit and not is_claim(commit.note)]
    rows = [
        table.read(version=version).select("id").withColumn("version", F.lit(version)) for version in versions
    ]
    found = {version: Counter[int]() for version in versions}
    for row in reduce(DataFrame.union, rows).collect():
        found[row["version"]][row["id"]] += 1
    assert len(found) > 1
    return [*found.values()]


class InterruptedTable(DeltaTable):
    """A table at whose first merge something happens, before it commits or after."""

    def __init__(self, jobs: Jobs, happens: Callable[[], None], *, after: bool = False) -> None:
        super().__init__(jobs.spark, jobs.output)
        self._happens: Callable[[], None] | None = happens
        self._after = after

    def replace(self, session: Any, rows: Any, replaced: Replaced, transaction: Transaction) -> None:
        happens, self._happens = self._happens, None
        if happens is not None and not self._after:
            happens()
        super().replace(session, rows, replaced, transaction)
        if happens is not None and self._after:
            happens()


def die() -> None:
    raise RuntimeError("the run dies")


@pytest.mark.long  # five jobs
def test_each_old_row_leaves_with_its_new_answer_and_readers_see_each_row_once(run: Jobs) -> None:
    run.write_input(ROWS)
    run.run(**IDS)
    first = DeltaTable(run.spark, run.output).version()
    with pytest.raises(JobError, match="--new-spec replace removes each old row"):
        run.run(**IDS, **SHOUT)
    with pytest.raises(RuntimeError, match="the run dies"):
        run.run(**IDS, **SHOUT, **REPLACE, limit=10, table=InterruptedTable(run, die, after=True))
    assert "each stays until its new one is committed" in run.printed
    assert Counter(used for _, used in prompts(run)) == {"Shout": 10, "Say": 20}
    # Without the option the spec goes on replacing, and the replaced one is refused as a new one.
    run.run(**IDS, **SHOUT)
    assert prompts(run) == all_by("Shout", ROWS)
    assert all(ids == Counter(range(30)) for ids in ids_by_version(run, first))
    with pytest.raises(JobError, match="holds rows that were annotated in another way"):
        run.run(**IDS)


@pytest.mark.long  # several jobs
def test_without_ids_as_many_equal_rows_leave_as_come(run: Jobs) -> None:
    rows = [(1, "a"), (1, "a"), (1, "a"), (2, "b")]
    run.write_input(rows)
    run.run()
    first = DeltaTable(run.spark, run.output).version()
    run.run(**SHOUT, **REPLACE, limit=2)
    assert Counter(used for _, used in prompts(run).elements()) == {"Shout": 2, "Say": 2}
    with pytest.raises(JobError, match="a retried row may be one of these or an error row"):
        run.run(**SHOUT, retry_errors=True)
    run.run(**SHOUT)
    assert prompts(run) == all_by("Shout", rows)
    assert all(ids == {1: 3, 2: 1} for ids in ids_by_version(run, first))


@pytest.mark.long
def test_without_ids_an_equal_row_that_stays_keeps_what_the_input_lacks(run: Jobs) -> None:
    run.write_input([(1, "a", "old"), (1, "a", "old"), (1, "a", "old")], "id long, text string, note string")
    run.run()
    table = f"delta.`{run.output}`"
    run.spark.sql(
        f"ALTER TABLE {table} SET TBLPROPERTIES ('delta.feature.allowColumnDefaults' = 'supported')"
    )
    run.spark.sql(f"ALTER TABLE {table} ADD COLUMNS (LABEL string)")
    run.spark.sql(f"ALTER TABLE {table} ALTER COLUMN LABEL SET DEFAULT 'new'")
    run.spark.sql(f"UPDATE {table} SET LABEL = 'seen'")
    run.write_input([(1, "a")] * 3)
    run.run(**SHOUT, **REPLACE, limit=1)
    assert Counter((row["note"], row["LABEL"]) for row in run.rows()) == {
        ("old", "seen"): 2,
        (None, "new"): 1,
    }


@pytest.mark.long
def test_a_spec_that_comes_back_is_annotated_again_also_by_nights(nights: Nights) -> None:
    nights.append(ROWS[:3])
    assert nights.run(**IDS) == (3, 0, 3)
    nights.append(ROWS[3:5])
    assert nights.run(**IDS, **SHOUT, **REPLACE) == (5, 0, 5)
    nights.append(ROWS[5:6])
    assert nights.run(**IDS, **SHOUT) == (1, 0, 1)
    assert prompts(nights.jobs) == all_by("Shout", ROWS[:6])
    # Its position of the first night would leave out rows that were replaced since.
    assert nights.run(**IDS, **REPLACE) == (6, 0, 6)
    assert prompts(nights.jobs) == all_by("Say", ROWS[:6])


@pytest.mark.long
def test_an_error_replaces_a_good_answer_and_rows_gone_from_the_input_stay(run: Jobs) -> None:
    run.write_input([(1, "one"), (2, "two"), (3, "three")])
    run.run(**IDS)
    run.write_input([(1, "one"), (2, None)])
    summary = run.run(**IDS, **SHOUT, **REPLACE)
    assert (summary.rows_out, summary.rows_error) == (2, 1)
    rows = {row["id"]: row["annotation"] for row in run.rows()}
    assert len(rows) == len(run.rows()) == 3
    assert rows[2]["error"]["code"] == "empty_prompt"
    assert rows[3]["text"] == expected_text("Say three", 16)
    run.write_input([(1, "one"), (2, "two")])
    retried = run.run(**IDS, **SHOUT, retry_errors=True)
    assert (retried.rows_out, retried.rows_error) == (1, 0)
    assert len(run.rows()) == 3


@pytest.mark.long
def test_rows_that_were_stacked_are_unstacked_though_nothing_is_left_to_annotate(run: Jobs) -> None:
    run.write_input(ROWS)
    run.run(**IDS)
    run.run(**IDS, **SHOUT, new_spec=NewSpec.STACK)
    assert len(run.rows()) == 60
    summary = run.run(**IDS, **REPLACE)
    assert (summary.rows_out, summary.rows_skipped) == (0, 30)
    assert "rows of other specs whose ids had a row of this one were removed" in run.printed
    assert prompts(run) == all_by("Say", ROWS)
    version = DeltaTable(run.spark, run.output).version()
    run.run(**IDS, **REPLACE)
    assert DeltaTable(run.spark, run.output).version() == version, "it commits nothing"


@pytest.mark.long
@pytest.mark.parametrize("id_columns", [("id",), ()], ids=["ids", "no ids"])
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_a_death_before_or_after_each_commit_neither_loses_nor_doubles_a_row(
    run: Jobs, id_columns: tuple[str, ...], after: bool
) -> None:
    rows = [*ROWS[:6], *ROWS[:3], *ROWS[:1]] if not id_columns else ROWS[:6]
    expected = Counter(number for number, _ in rows)
    run.write_input(rows)
    run.run(id_columns=id_columns)
    first = DeltaTable(run.spark, run.output).version()
    for _ in range(2):  # the second commits first what the first had completed
        table = InterruptedTable(run, die, after=after)
        with pytest.raises(RuntimeError, match="the run dies"):
            run.run(id_columns=id_columns, table=table, **SHOUT, **REPLACE, limit=2)
    run.run(id_columns=id_columns, **SHOUT, **REPLACE)
    assert prompts(run) == all_by("Shout", rows)
    assert all(ids == expected for ids in ids_by_version(run, first))


@pytest.mark.long
@pytest.mark.parametrize("id_columns", [("id",), ()], ids=["ids", "no ids"])
def test_of_two_runs_at_once_one_replaces_each_row_once(run: Jobs, id_columns: tuple[str, ...]) -> None:
    run.write_input(ROWS)
    run.run(id_columns=id_columns)
    first = DeltaTable(run.spark, run.output).version()
    options = {"id_columns": id_columns, **SHOUT, **REPLACE}

    def overtake() -> None:
        run.run(work_dir=str(run.directory / "other"), **options)

    with pytest.raises(JobFailedError, match="was taken over by run"):
        run.run(work_dir=str(run.directory / "one"), table=InterruptedTable(run, overtake), **options)
    assert prompts(run) == all_by("Shout", ROWS)
    assert all(ids == Counter(range(30)) for ids in ids_by_version(run, first))


@pytest.mark.long
def test_another_writer_in_the_midst_of_a_merge_neither_loses_nor_doubles_a_row(run: Jobs) -> None:
    run.write_input(ROWS)
    run.run(**IDS)
    first = DeltaTable(run.spark, run.output).version()

    def write() -> None:
        run.spark.sql(f"OPTIMIZE delta.`{run.output}`")
        run.spark.sql(f"ALTER TABLE delta.`{run.output}` SET TBLPROPERTIES ('a' = 'b')")

    run.run(**IDS, **SHOUT, **REPLACE, table=InterruptedTable(run, write))
    assert prompts(run) == all_by("Shout", ROWS)
    assert all(ids == Counter(range(30)) for ids in ids_by_version(run, first))


@pytest.mark.long
def test_a_killed_run_is_gone_on_with_and_every_version_has_each_row_once(run: Jobs) -> None:
    ids = range(3_000)
    run.write_input([(i, f"word {i}") for i in ids])
    run.run(**IDS)
    first, before = DeltaTable(run.spark, run.output).version(), committed_chunks(run.output)
    run.defaults = replace(run.defaults, **SHOUT)
    job = start_job(run.defaults, "--id-columns", "id", "--new-spec", "replace", commit_every="1s")
    kill_when(lambda: committed_chunks(run.output) > before, job, run.defaults)
    used = Counter(used for _, used in prompts(run))
    assert used["Shout"] > 0
    assert used["Say"] > 0
    run.run(**IDS)
    assert prompts(run) == all_by("Shout", [(i, "") for i in ids])
    assert all(len(found) == found.total() == len(ids) for found in ids_by_version(run, first))


@pytest.mark.long
def test_reuse_where_and_order_replace_too(run: Jobs) -> None:
    run.write_input(ROWS[:8])
    run.run(**IDS)
    run.run(**IDS, **SHOUT, output=str(run.directory / "earlier"), where="id < 4")
    summary = run.run(
        **IDS, **SHOUT, **REPLACE, reuse=str(run.directory / "earlier"), where="id < 6", order_by="id DESC"
    )
    assert (summary.rows_from_table, summary.rows_out) == (4, 2)
    assert prompts(run) == all_by("Shout", ROWS[:6]) + all_by("Say", ROWS[6:8])
