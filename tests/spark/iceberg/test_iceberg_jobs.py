"""Whole jobs whose output, and in some whose input too, is an Iceberg table."""

from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from pipemax.wire import ErrorCode
from pipemax_spark.errors import JobError, JobFailedError
from pipemax_spark.storage.iceberg import IcebergTable
from tests.spark.iceberg.conftest import IcebergJobs

pytestmark = pytest.mark.iceberg

ROWS = [(number, f"word {number % 30}") for number in range(40)]


def annotated(run: IcebergJobs) -> Counter[tuple[int, str]]:
    rows = run.rows()
    assert all(row["annotation"]["text"] and row["annotation"]["error"] is None for row in rows)
    return Counter((row["id"], row["text"]) for row in rows)


class InterruptedTable(IcebergTable):
    """A table at whose first chunk something happens, once the chunk's rows are in its branch."""

    def __init__(self, spark: Any, name: str, happens: Callable[[], None]) -> None:
        super().__init__(spark, name)
        self._happens: Callable[[], None] | None = happens

    def _write(self, rows: Any, branch: str, *, source: int | None = None) -> Any:
        files = super()._write(rows, branch, source=source)
        happens, self._happens = self._happens, None
        if happens is not None:
            happens()
        return files


def interrupted(run: IcebergJobs, happens: Callable[[], None], **changes: Any) -> None:
    run.run(table=InterruptedTable(run.spark, run.output, happens), **changes)


def die() -> None:
    raise RuntimeError("the run dies")


@pytest.mark.parametrize("id_columns", [("id",), ()])
def test_every_row_is_answered_once_and_a_rerun_does_only_what_is_new(
    run: IcebergJobs, id_columns: tuple[str, ...]
) -> None:
    run.write_input(ROWS)
    first = run.run(id_columns=id_columns)
    assert (first.rows_out, first.output_format) == (40, "Iceberg")
    assert annotated(run) == Counter(ROWS)
    before = IcebergTable(run.spark, run.output).version()
    again = run.run(id_columns=id_columns)
    assert (again.rows_out, again.rows_skipped) == (0, 40)
    assert IcebergTable(run.spark, run.output).version() == before, "it commits nothing"
    more = [*ROWS, (40, "more"), (41, "more")]
    run.write_input(more)
    assert run.run(id_columns=id_columns).rows_out == 2
    assert annotated(run) == Counter(more)
    notes = IcebergTable(run.spark, run.output).notes("pipemax run ", since_version=0)
    summaries = run.spark.sql(f"SELECT summary['pipemax.commit'] AS note FROM {run.output}.snapshots")
    assert set(notes) <= {row["note"] for row in summaries.collect()}
    assert len(notes) >= 2


def test_a_partitioned_table_and_a_pinned_input_keep_their_rows_and_their_layout(
    run: IcebergJobs, catalog: str
) -> None:
    source = f"{catalog}.db.questions"
    run.spark.sql(f"DROP TABLE IF EXISTS {source}")
    rows = run.spark.createDataFrame(
        [(n, f"word {n}", n % 3) for n in range(30)], "id long, text string, day int"
    )
    rows.withColumn("day", rows["day"].cast("smallint")).writeTo(source).create()
    run.spark.sql(f"ALTER TABLE {source} CREATE TAG asked")
    rows.limit(3).writeTo(source).append()
    run.spark.sql(
        f"CREATE TABLE {run.output} (id BIGINT NOT NULL, text STRING, day INT) USING iceberg PARTITIONED BY (day)"
    )
    summary = run.run(input=source, input_option={"versionAsOf": "asked"}, id_columns=("id",))
    assert summary.rows_out == 30
    assert Counter(row["day"] for row in run.rows()) == {0: 10, 1: 10, 2: 10}
    [partitions] = run.spark.sql(f"SELECT count(*) AS n FROM {run.output}.partitions").collect()
    assert partitions["n"] == 3
    assert not run.spark.table(run.output).schema["id"].nullable
    with pytest.raises(JobError, match="has no snapshot, branch or tag never"):
        run.run(input=source, input_option={"versionAsOf": "never"}, id_columns=("id",))
    with pytest.raises(JobError, match="--incremental reads what was appended to a Delta or Iceberg table"):
        run.run(input=source, input_option={"versionAsOf": "asked"}, id_columns=("id",), incremental=True)
    location = IcebergTable(run.spark, source).location()
    with pytest.raises(JobError, match="holds an Iceberg table, which is read by its name"):
        run.run(input=location, id_columns=("id",))
    run.spark.sql(f"DROP TABLE {source}")


@pytest.mark.parametrize("id_columns", [("id",), ()])
def test_a_run_that_dies_with_rows_in_its_branch_leaves_them_to_the_next(
    run: IcebergJobs, id_columns: tuple[str, ...]
) -> None:
    run.write_input(ROWS)
    with pytest.raises(RuntimeError, match="the run dies"):
        interrupted(run, die, id_columns=id_columns)
    assert run.rows() == []
    run.run(id_columns=id_columns)
    assert "rows that run" in run.printed, "what the dead run had completed is committed now"
    assert annotated(run) == Counter(ROWS)


def test_a_run_that_is_overtaken_within_its_commit_ends_and_each_row_stays_once(
    run: IcebergJobs,
) -> None:
    run.write_input(ROWS)

    def overtake() -> None:
        run.run(id_columns=("id",), work_dir=str(run.directory / "other"))

    with pytest.raises(JobFailedError, match="was taken over by run"):
        interrupted(run, overtake, id_columns=("id",), work_dir=str(run.directory / "one"))
    assert annotated(run) == Counter(ROWS)


def test_error_rows_and_changed_rows_are_replaced_when_asked(run: IcebergJobs) -> None:
    run.write_input([(1, "fine"), (2, None), (3, "[[error]]"), (4, None)])
    run.run(id_columns=("id",))
    run.write_input([(1, "fine"), (2, "mended"), (3, "[[error]]"), (5, "new")])
    again = run.run(id_columns=("id",), retry_errors=True)
    assert (again.rows_out, again.rows_error, again.rows_skipped) == (3, 1, 1)
    codes = {
        row["id"]: row["annotation"]["error"] and row["annotation"]["error"]["code"] for row in run.rows()
    }
    assert codes == {1: None, 2: None, 3: ErrorCode.ENGINE_ERROR, 4: ErrorCode.EMPTY_PROMPT, 5: None}
    run.write_input([(1, "changed"), (2, "mended")])
    assert run.run(id_columns=("id",), redo_changed=True).rows_out == 1
    texts = {row["id"]: row["text"] for row in run.rows()}
    assert (texts[1], len(texts), len(run.rows())) == ("changed", 5, 5)
    run.spark.sql(f"ALTER TABLE {run.output} SET TBLPROPERTIES ('write.delete.mode' = 'merge-on-read')")
    with pytest.raises(JobError, match="replace rows by copy-on-write"):
        run.run(id_columns=("id",), retry_errors=True)


def test_equal_error_rows_without_ids_are_replaced_one_by_one(run: IcebergJobs) -> None:
    run.write_input([(1, "[[error]]"), (1, "[[error]]"), (1, "[[error]]")])
    run.run(max_error_rate=1.0)
    run.spark.sql(f"ALTER TABLE {run.output} ADD COLUMNS (note string)")
    run.spark.sql(f"UPDATE {run.output} SET note = 'seen'")
    run.write_input([(1, "[[error]]")])
    assert run.run(retry_errors=True).rows_out == 1
    assert Counter(row["note"] for row in run.rows()) == {"seen": 2, None: 1}


def test_a_bad_night_is_red_again_in_its_rerun_until_its_rows_are_mended(run: IcebergJobs) -> None:
    good = [(i, f"row {i}") for i in range(60)]
    run.write_input(good)
    run.run(id_columns=("id",))
    run.write_input([*good, *((i, None) for i in range(60, 85))])
    with pytest.raises(JobFailedError, match=r"25 of 25 rows failed, more than"):
        run.run(id_columns=("id",))
    for _ in range(2):
        with pytest.raises(
            JobFailedError, match=r"25 of 25 rows in \S+, written by run \S+, failed, more than"
        ):
            run.run(id_columns=("id",))
    run.write_input([(i, f"row {i}") for i in range(85)])
    assert run.run(id_columns=("id",), retry_errors=True).rows_error == 0
    assert run.run(id_columns=("id",)).ended_by == "done"


def test_neither_compaction_nor_expired_snapshots_make_a_done_row_undone(run: IcebergJobs) -> None:
    run.write_input(ROWS)
    run.run(id_columns=("id",), compact=True, commit_every=timedelta(milliseconds=1))
    assert "small files were compacted into" in run.printed
    run.spark.sql(
        f"CALL {run.output.split('.')[0]}.system.expire_snapshots("
        "table => 'db.answers', older_than => TIMESTAMP '2099-01-01 00:00:00', retain_last => 1)"
    )
    assert run.run(id_columns=("id",)).rows_skipped == 40
    assert annotated(run) == Counter(ROWS)


def test_a_new_answer_s_fields_are_added_to_the_table(run: IcebergJobs) -> None:
    run.write_input(ROWS[:3])
    run.run(id_columns=("id",))
    run.write_input([(9, "more", 1.5)], "id long, text string, extra double")
    run.run(id_columns=("id",))
    assert {row["id"]: row["extra"] for row in run.rows()} == {0: None, 1: None, 2: None, 9: 1.5}


def test_a_table_of_format_version_1_is_refused_early(run: IcebergJobs) -> None:
    run.write_input(ROWS)
    run.spark.sql(
        f"CREATE TABLE {run.output} (id BIGINT, text STRING) USING iceberg TBLPROPERTIES ('format-version' = '1')"
    )
    with pytest.raises(JobError, match="format version 1; upgrade it"):
        run.run(id_columns=("id",))


def test_a_branch_of_a_table_is_refused_and_not_taken_for_the_table(run: IcebergJobs) -> None:
    run.write_input(ROWS)
    run.spark.sql(f"CREATE TABLE {run.output} (id BIGINT, text STRING) USING iceberg")
    run.spark.sql(f"INSERT INTO {run.output} VALUES (-1, 'x')")
    run.spark.sql(f"ALTER TABLE {run.output} CREATE BRANCH nightly")
    run.spark.sql(f"ALTER TABLE {run.output} CREATE TAG monday")
    for part in ("branch_nightly", "tag_monday"):
        with pytest.raises(JobError, match="and the job commits to a table's main branch only"):
            run.run(id_columns=("id",), output=f"{run.output}.{part}")
    assert [row["id"] for row in run.rows()] == [-1]
