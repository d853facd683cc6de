"""Nights that cannot go on from where the last one ended say so, and each remedy that a message names repairs them.

A case is a history of the input after the first night, the sentence with which the next night ends, and the remedies
that the sentence names. Each remedy ends with every row of the input in the output once, and the night after it is
incremental again.
"""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pipemax_spark.errors import JobError
from tests.spark.conftest import Nights, words
from tests.spark.spark_work import set_to

IGNORES_MISSING = "spark.sql.files.ignoreMissingFiles"
RESCAN = {"rescan": True}
SKIP = {"skip_changes": True}


@pytest.fixture(autouse=True)
def unset_settings(spark: Any) -> Iterator[None]:
    yield
    spark.conf.unset(IGNORES_MISSING)


def vacuumed(nights: Nights) -> None:
    """Missed nights, then OPTIMIZE, and VACUUM of the files that they had brought, which the session would ignore."""
    nights.jobs.spark.conf.set(IGNORES_MISSING, "true")
    nights.append(words(4, 6))
    nights.append(words(6, 8))
    nights.sql("OPTIMIZE {input}")
    with set_to(nights.jobs.spark, {"spark.databricks.delta.retentionDurationCheck.enabled": "false"}):
        nights.sql("VACUUM {input} RETAIN 0 HOURS")


def log_cleaned(nights: Nights) -> None:
    """The log's files of the missed nights are gone, behind a checkpoint of the log."""
    nights.append(words(4, 6))
    nights.append(words(6, 7))
    nights.sql("ALTER TABLE {input} SET TBLPROPERTIES ('delta.checkpointInterval' = '1')")
    nights.append(words(7, 8))
    for version in (0, 1, 2):
        forget(nights, version)


def forget(nights: Nights, version: int) -> None:
    for file in Path(nights.input, "_delta_log").glob(f"*{version:020}.*"):
        if "checkpoint" not in file.name:
            file.unlink()


def older_copy(nights: Nights) -> None:
    """A copy from before the night takes the table's place: the position is beyond its versions."""
    set_back(nights)


def older_copy_that_grew(nights: Nights) -> None:
    set_back(nights)
    nights.append(words(4, 6))
    nights.append(words(6, 8))


def set_back(nights: Nights) -> None:
    shutil.rmtree(nights.input)
    shutil.copytree(f"{nights.input} copy", nights.input)
    nights.jobs.spark.catalog.clearCache()
    nights.jobs.spark._jvm.org.apache.spark.sql.delta.DeltaLog.clearCache()


def updated(nights: Nights) -> None:
    nights.append(words(4, 6))
    nights.sql("UPDATE {input} SET text = 'changed' WHERE id = 1")
    nights.append(words(6, 8))
    nights.append([(0, "an id that was appended again")])


def restored(nights: Nights) -> None:
    nights.append(words(4, 8))
    nights.sql("RESTORE TABLE {input} TO VERSION AS OF 1")
    nights.append(words(4, 8))


CHANGED = "rows of input .* were updated or deleted since the last run.*--skip-changes.*--rescan once"
CASES = {
    "vacuumed": (vacuumed, "files that were appended since are gone.*--rescan once", [RESCAN]),
    "log cleaned": (log_cleaned, "no longer has all versions after 1.*--rescan once", [RESCAN]),
    "an older copy": (older_copy, "the table is at version 0, so an older copy.*--rescan once", [RESCAN]),
    "an older copy that grew": (
        older_copy_that_grew,
        "version 1 is another commit now.*--rescan once",
        [RESCAN],
    ),
    "updated": (updated, CHANGED, [RESCAN, SKIP]),
    "restored": (restored, CHANGED, [RESCAN]),
}
REMEDIES = [
    pytest.param(history, said, remedy, id=case, marks=pytest.mark.long)
    for name, (history, said, remedies) in CASES.items()
    for remedy in remedies
    for case in [f"{name}: {', '.join(remedy)}"]
]


@pytest.mark.parametrize(("history", "said", "remedy"), REMEDIES)
def test_a_night_that_cannot_go_on_is_repaired_by_each_remedy_that_it_names(
    nights: Nights, history: Callable[[Nights], None], said: str, remedy: dict[str, Any]
) -> None:
    nights.append(words(0, 2))
    shutil.copytree(nights.input, f"{nights.input} copy")
    nights.append(words(2, 4))
    ids = {"id_columns": ("id",)}
    nights.run(**ids)
    history(nights)
    before = nights.appends()
    with pytest.raises(JobError, match=said):
        nights.run(**ids)
    assert len(nights.appends()) == len(before)

    in_input = sorted(
        row["id"] for row in nights.jobs.spark.read.format("delta").load(nights.input).collect()
    )
    missing = len({*in_input} - {*nights.ids()})
    rows_in, _, rows_out = nights.run(**ids, **remedy)
    assert rows_out == missing
    if remedy is RESCAN:
        assert rows_in == len(in_input)
    assert nights.ids() == sorted({*in_input, *range(4)})
    nights.append(words(100, 103))
    assert nights.run(**ids) == (3, 0, 3), "without the remedy, the next night goes on from there"


@pytest.mark.long  # one more history
@pytest.mark.parametrize(
    "replaced",
    [False, pytest.param(True, marks=pytest.mark.long)],
    ids=["dropped and made again", "replaced"],
)
def test_a_table_that_is_made_anew_is_compared_and_followed_from_then_on(
    nights: Nights, replaced: bool
) -> None:
    """Made again, it is another table, and all of it is compared; replaced, it is the same, of which rows are gone."""
    ids = {"id_columns": ("id",)}
    nights.append(words(0, 3))
    nights.run(**ids)
    if replaced:
        spark = nights.jobs.spark
        frame = spark.createDataFrame(words(2, 5), "id long, text string")
        frame.write.format("delta").mode("overwrite").save(nights.input)
        with pytest.raises(JobError, match=CHANGED):
            nights.run(**ids)
        assert nights.run(**ids, **RESCAN) == (3, 1, 2)
    else:
        shutil.rmtree(nights.input)
        nights.jobs.spark._jvm.org.apache.spark.sql.delta.DeltaLog.clearCache()
        nights.append(words(2, 5))
        assert nights.run(**ids) == (3, 1, 2)
    nights.append(words(5, 6))
    assert nights.run(**ids) == (1, 0, 1)
    assert nights.ids() == [0, 1, 2, 3, 4, 5]


@pytest.mark.long  # four runs of one more history
@pytest.mark.parametrize(
    ("appended", "said", "mended", "skips"),
    ids=["ids twice", "null ids"],
    argvalues=[
        (
            [(7, "a"), (7, "b")],
            "ids are not unique.*Remove the duplicates, if the input still has any, and give --rescan",
            "DELETE FROM {input} WHERE text = 'b'",
            True,
        ),
        pytest.param(
            [(None, "a")],
            "hold nulls.*fill them in, if the input still has any, and give --rescan",
            "UPDATE {input} SET id = 7 WHERE id IS NULL",
            False,
            marks=pytest.mark.long,
        ),
    ],
)
def test_appended_ids_that_cannot_be_used_are_mended_in_the_input_and_compared_once(
    nights: Nights, appended: list[tuple[Any, ...]], said: str, mended: str, skips: bool
) -> None:
    nights.append(words(0, 2))
    ids = {"id_columns": ("id",)}
    nights.run(**ids)
    nights.append(appended)
    with pytest.raises(JobError, match=said):
        nights.run(**ids)
    nights.sql(mended)
    if skips:  # the rows come as they were appended
        with pytest.raises(JobError, match=said):
            nights.run(**ids, skip_changes=True)
    assert nights.run(**ids, rescan=True) == (3, 2, 1)
    assert nights.run(**ids) == (0, 0, 0)
    assert nights.ids() == [0, 1, 7]


@pytest.mark.long  # fourteen runs
def test_runs_that_incremental_refuses_are_done_without_it_and_the_nights_go_on(nights: Nights) -> None:
    ids = {"id_columns": ("id",)}
    nights.append(words(0, 4))
    for options, said in (
        ({"limit": 1}, "--limit cannot be combined with --incremental.*once without --incremental"),
        (
            {"retry_errors": True},
            "--retry-errors cannot be combined with --incremental.*once without --incremental",
        ),
        (
            {"redo_changed": True},
            "--redo-changed cannot be combined with --incremental.*once without --incremental",
        ),
        (
            {"incremental": False, "rescan": True},
            "--rescan says how --incremental reads its input; give both",
        ),
        (
            {"rescan": True, "input_option": {"startingVersion": "0"}},
            "startingVersion leaves some out; leave out one",
        ),
        (
            {"input_option": {"failOnDataLoss": "false"}},
            "failOnDataLoss=false would leave rows out in silence; without it",
        ),
        (
            {"input_option": {"startingVersion": "9"}},
            "input option startingVersion says.*or leave the option out",
        ),
    ):
        with pytest.raises(JobError, match=said):
            nights.run(**ids, **options)
    assert nights.run(**ids, incremental=False, limit=1) == (4, 0, 1)
    assert nights.run(**ids) == (4, 1, 3)
    nights.append([(4, None), (5, "word 5")])
    assert nights.run(**ids) == (2, 0, 2)
    assert nights.run(**ids, incremental=False, retry_errors=True) == (6, 5, 1)
    nights.sql("UPDATE {input} SET text = 'changed' WHERE id = 3")
    assert nights.run(**ids, incremental=False, redo_changed=True) == (6, 5, 1)
    assert nights.run(**ids, skip_changes=True) == (0, 0, 0)
    nights.append(words(6, 7))
    assert nights.run(**ids) == (1, 0, 1)
    assert nights.ids() == list(range(7))
    assert {row["text"] for row in nights.jobs.rows() if row["id"] == 3} == {"changed"}


@pytest.mark.long  # three nights and a rescan
def test_nights_begin_where_an_option_of_the_user_s_says(nights: Nights) -> None:
    options = {"id_columns": ("id",), "input_option": {"startingVersion": "1"}}
    nights.append(words(0, 2))
    nights.append(words(2, 4))
    assert nights.run(**options) == (2, 0, 2)
    nights.append(words(4, 5))
    assert nights.run(**options) == (1, 0, 1)
    assert nights.run(id_columns=("id",), rescan=True) == (5, 3, 2)
    assert nights.ids() == list(range(5))
