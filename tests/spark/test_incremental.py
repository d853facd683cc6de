"""Nightly runs over a Delta table that grows: every appended row once, whatever happened the night before."""

import json
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipemax_spark.errors import JobError, OnError
from pipemax_spark.rows.incremental import MicroBatches
from pipemax_spark.rows.position import Nights as NightsOfInput
from pipemax_spark.rows.position import Positions
from pipemax_spark.storage.sources import read_source
from pipemax_spark.storage.tables import DeltaTable
from tests.fakes.settings import expected_text
from tests.spark.conftest import Nights, words
from tests.spark.test_killed_job import SLOW, kill_when, rows_in_spool, start_job


@pytest.mark.long  # four runs; a night without position meets rows that are done, below
@pytest.mark.parametrize("id_columns", [("id",), ()])
def test_what_a_run_over_the_whole_table_has_done_the_stream_knows_and_the_other_way_round(
    nights: Nights, id_columns: tuple[str, ...]
) -> None:
    nights.append(words(0, 300))
    assert nights.run(id_columns=id_columns) == (300, 0, 300)
    nights.append(words(300, 310))
    assert nights.run(id_columns=id_columns, incremental=False) == (310, 300, 10)
    assert nights.run(id_columns=id_columns) == (10, 10, 0)
    assert nights.ids() == list(range(310))
    assert [rows for _, rows in nights.appends()] == [300, 10]


@pytest.mark.long  # three nights
def test_a_night_that_compares_all_rows_does_further_copies_of_rows_that_are_done(nights: Nights) -> None:
    nights.append(words(0, 3))
    assert nights.run(id_columns=(), incremental=False) == (3, 0, 3)
    nights.append([*words(0, 2), *words(0, 2)])
    assert nights.run(id_columns=()) == (7, 3, 4)
    assert nights.ids() == [0, 0, 0, 1, 1, 1, 2]


@pytest.mark.parametrize("id_columns", [pytest.param(("id",), marks=pytest.mark.long), ()])
def test_a_night_without_position_adds_nothing_and_the_next_one_goes_on_also_under_a_new_schema(
    nights: Nights, id_columns: tuple[str, ...]
) -> None:
    nights.append([*words(0, 50), *([] if id_columns else words(0, 5))])
    nights.run(id_columns=id_columns)
    before = nights.appends()
    # A restored output may lack rows that the position says are done.
    output = DeltaTable(nights.jobs.spark, nights.jobs.output)
    nights.jobs.spark.sql(f"RESTORE TABLE {output.sql_name} TO VERSION AS OF {output.version() - 1}")
    rows_in, skipped, rows_out = nights.run(id_columns=id_columns)
    assert (rows_in, rows_out) == (skipped, 0)
    assert rows_in > 0, "all rows were compared"
    assert nights.appends() == before

    # The next night brings updates and a new column too.
    nights.append([(i, text, "de") for i, text in words(50, 60)], "id long, text string, language string")
    nights.sql("UPDATE {input} SET text = 'changed' WHERE id = 13")
    with pytest.raises(JobError, match=r"were updated or deleted since the last run.*--skip-changes"):
        nights.run(id_columns=id_columns)
    assert nights.run(id_columns=id_columns, skip_changes=True) == (10, 0, 10)
    rows = nights.jobs.rows()
    texts = {row["id"]: row["text"] for row in rows}
    assert texts == dict(words(0, 60)), "a row stays as it was when it was appended"
    assert {row["id"]: row["language"] for row in rows} == dict.fromkeys(range(50)) | dict.fromkeys(
        range(50, 60), "de"
    )
    assert all(row["annotation"]["text"] == expected_text(f"Say {row['text']}", 16) for row in rows)
    *earlier, (last, num_last) = nights.appends()
    assert (earlier, num_last) == (before, 10)
    assert " of stream " in last
    assert not any(" of stream " in note for note, _ in before)


@pytest.mark.long  # three nights
@pytest.mark.parametrize("is_torn", [False, True])
def test_the_checkpoint_of_an_earlier_version_is_read_once_and_then_left(
    nights: Nights, tmp_path: Path, is_torn: bool
) -> None:
    nights.append(words(0, 3))
    nights.run(incremental=False)
    (spec_hash,) = {row["annotation"]["spec_hash"] for row in nights.jobs.rows()}
    table = DeltaTable(nights.jobs.spark, nights.input)
    file = tmp_path / "positions" / f"{table.table_id()}-{spec_hash}.json"
    file.parent.mkdir()
    text = json.dumps({"version": 0, "commit": table.commit_mark(0)})
    file.write_text(text[:5] if is_torn else text)
    nights.append(words(3, 5))
    options = {"checkpoint": str(file.parent)}
    assert nights.run(**options) == ((5, 3, 2) if is_torn else (2, 0, 2))
    assert ("holds no position" in nights.jobs.printed) is is_torn
    nights.append(words(5, 6))
    file.write_text(json.dumps({"version": 3, "commit": None}))
    assert nights.run(**options) == (1, 0, 1), "the output's position counts"
    assert nights.ids() == list(range(6))


@pytest.mark.long  # two runs
def test_a_run_that_compares_all_rows_without_ids_annotates_each_new_copy_of_a_row(nights: Nights) -> None:
    nights.append(words(0, 20))
    nights.run(incremental=False)
    nights.append([*words(10, 30), *words(15, 16)])
    assert nights.run() == (41, 20, 21)
    assert nights.ids() == sorted([*range(20), *range(10, 30), 15])


@pytest.mark.long
@pytest.mark.parametrize("id_columns", [("id",), ()])
def test_rows_that_a_skipped_commit_inserted_are_annotated_and_what_it_changed_is_named(
    nights: Nights, id_columns: tuple[str, ...]
) -> None:
    nights.append(words(0, 5))
    nights.run(id_columns=id_columns, where="id < 100")
    nights.jobs.spark.createDataFrame([(2, "changed"), (5, "word 5"), (6, "word 6"), (200, "no")]).toDF(
        "id", "text"
    ).createOrReplaceTempView("news")
    nights.sql(
        "MERGE INTO {input} AS t USING news AS s ON t.id = s.id WHEN MATCHED THEN UPDATE SET * "
        "WHEN NOT MATCHED THEN INSERT *"
    )
    changed = 0 if id_columns else 1
    options = {"id_columns": id_columns, "skip_changes": True, "where": "id < 100"}
    assert nights.run(**options) == (2 + changed, 0, 2 + changed)
    assert (
        "skips commit 1 (MERGE: 1 row updated) of the input, but rows that it inserted" in nights.jobs.printed
    )
    assert nights.run(**options) == (0, 0, 0)
    assert "nothing new to do" in nights.jobs.printed
    nights.append(words(7, 9))
    nights.sql("UPDATE {input} SET text = 'changed' WHERE id = 3")
    assert nights.run(**options) == (2, 0, 2)
    assert "skips commit 3 (UPDATE: 1 row updated) of the input" in nights.jobs.printed
    assert sorted({*nights.ids()}) == list(range(9))
    assert len(nights.ids()) == 9 + changed
    if id_columns:
        assert {row["id"]: row["text"] for row in nights.jobs.rows()} == dict(words(0, 9))


@pytest.mark.long  # the first test has the nights, test_killed_job what is kept
def test_a_batch_that_failed_half_way_is_retried_and_only_its_rest_is_computed(nights: Nights) -> None:
    """The first chunk is committed, then a row ends the run."""
    nights.append(words(0, 1_200))
    nights.append([(1_200, None)])
    failing: dict[str, Any] = {"on_error": OnError.FAIL, "commit_every": timedelta(seconds=0.1)}
    with pytest.raises(Exception, match="a row failed with empty_prompt"):
        nights.run(engine=SLOW, **failing)
    committed = len(nights.jobs.rows())
    nights.append(words(4_000, 4_010))
    rows_in, skipped, rows_out = nights.run()
    assert (rows_in, skipped + rows_out) == (1_211, 1_211)
    assert skipped >= committed
    assert nights.ids() == [*range(1_201), *range(4_000, 4_010)]


@pytest.mark.long
def test_a_job_killed_during_a_batch_is_repaired_by_the_same_command(nights: Nights) -> None:
    rows = [(i, f"word {i % 2_000}") for i in range(6_000)]
    nights.append(rows)
    job = start_job(replaced_input(nights), "--incremental", commit_every="1h")
    spooled = Path(nights.jobs.output, "_pipemax")
    kill_when(lambda: rows_in_spool(spooled) > 0, job, nights.jobs.defaults)
    assert len(nights.jobs.rows()) < len(rows)

    nights.append(words(9_000, 9_010))
    rows_in, skipped, rows_out = nights.run(engine=SLOW)
    assert "had completed were committed now" in nights.jobs.printed
    assert skipped > 0, "what the killed run had completed was not asked for again"
    assert (rows_in, skipped + rows_out) == (6_010, 6_010)
    assert nights.ids() == [*range(6_000), *range(9_000, 9_010)]


def replaced_input(nights: Nights) -> Any:
    return replace(nights.jobs.defaults, input=nights.input)


def test_an_input_that_cannot_be_streamed_is_refused_at_once(nights: Nights) -> None:
    nights.append([(1, "a"), (1, "b")])
    with pytest.raises(JobError, match=r"ids are not unique: id=1 \(2 rows\)"):
        nights.run(id_columns=("id",))
    nights.jobs.write_input([(1, "a")])
    with pytest.raises(JobError, match=r"--incremental reads what was appended to a Delta or Iceberg table"):
        nights.jobs.run(incremental=True)
    with pytest.raises(JobError, match="--skip-changes says how --incremental reads"):
        nights.run(incremental=False, skip_changes=True)


def test_the_position_advances_when_what_follows_the_last_batch_is_requested(
    nights: Nights, spark: Any, tmp_path: Path
) -> None:
    runs = iter(range(10))
    output = DeltaTable(spark, nights.jobs.output)
    output.create(spark.createDataFrame([], "id long").schema)

    def batches(**options: str) -> MicroBatches:
        source = read_source(spark, nights.input)
        directory = str(tmp_path / f"stream {next(runs)}")
        job = replace(nights.jobs.defaults, incremental=True, input_option=options)
        checked: Any = SimpleNamespace(source=source, spec=SimpleNamespace(hash="h"))
        work: Any = SimpleNamespace(path=directory)
        positions = Positions(output, NightsOfInput(input_id="i", spec_hash="h"))
        return MicroBatches(spark, job, checked, work, positions)

    def seen(stream: Iterator[Any]) -> list[tuple[int | None, int]]:
        return [(getattr(batch.part, "batch_id", None), batch.rows.count()) for batch in stream]

    nights.append(words(0, 3))
    for _ in range(2):
        with batches() as stream:
            assert next(iter(stream)).rows.count() == 3
    with batches() as stream:
        assert seen(iter(stream)) == [(None, 3)]
    nights.append(words(3, 5))
    nights.append(words(5, 9))
    with batches(maxFilesPerTrigger="1") as stream:
        assert next(iter(stream)).rows.count() > 0
    with batches(maxFilesPerTrigger="1") as stream:
        numbers, counts = zip(*seen(iter(stream)), strict=True)
    assert numbers == tuple(range(len(counts)))
    assert (len(counts) > 1, sum(counts)) == (True, 6)
    with batches() as stream:
        assert seen(iter(stream)) == []
