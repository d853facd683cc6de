"""A table as an earlier version left it in the midst of a run, with the run's work directory: this version goes on.

``tests/golden/unfinished_run.zip`` holds the input ``in`` (1,200 rows with ids) and the output ``out``. Its run had
prepared four slices, committed the first and the third as chunks, completed the second without committing it, and died.
It is never recorded again. In its manifest ``{directory}`` stands for the directory of both.
"""

import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from pipemax_spark.errors import JobError
from pipemax_spark.request.prompts import PromptSource
from pipemax_spark.request.spec import AnnotationSpec
from pipemax_spark.storage.spec_properties import spec_texts
from pipemax_spark.storage.tables import DeltaTable
from tests.fakes.settings import expected_text
from tests.spark.conftest import Jobs

RECORDED = Path(__file__).parents[1] / "golden" / "unfinished_run.zip"
RUN = "20261126T220355-bb326d7f"
SPEC_HASH = "1460413bd5274f62"
NUM_ROWS, COMMITTED, SPOOLED = 1_200, 327 + 282, 291
CLAIMS = {f"pipemax claim by run {RUN}: epoch 2, lane {lane}" for lane in range(6)}
CHUNKS = [
    (f"pipemax run {RUN} chunk 0 (slices 0 to 0)", 327),
    (f"pipemax run {RUN} chunk 2 (slices 2 to 2)", 282),
]


@pytest.fixture
def run(run: Jobs) -> Jobs:
    """Jobs like the recorded one, on the recorded table."""
    with zipfile.ZipFile(RECORDED) as archive:
        archive.extractall(run.directory)
    (manifest,) = Path(run.output, "_pipemax").glob(f"*/{RUN}/manifest.json")
    manifest.write_text(manifest.read_text().replace("{directory}", str(run.directory)))
    run.defaults = replace(run.defaults, input=str(run.directory / "in"), id_columns=("id",))
    return run


def append(run: Jobs, first: int, end: int) -> None:
    rows = run.spark.range(first, end, numPartitions=1).selectExpr("id", "concat('word ', id % 400) AS text")
    rows.write.format("delta").mode("append").save(run.defaults.input)


def check_answers(run: Jobs, num_rows: int) -> None:
    """Each row once, with its own answer, under the recorded spec."""
    rows = run.rows()
    assert sorted(row["id"] for row in rows) == list(range(num_rows))
    assert all(row["annotation"]["text"] == expected_text(f"Say {row['text']}", 16) for row in rows)
    assert {row["annotation"]["spec_hash"] for row in rows} == {SPEC_HASH}


@pytest.mark.long  # three jobs
def test_a_recorded_table_is_resumed_finished_and_made_incremental(run: Jobs) -> None:
    assert len(run.rows()) == COMMITTED
    summary = run.run()
    assert f"{NUM_ROWS - COMMITTED:,} of the rows that run {RUN} had prepared" in run.printed
    assert f"{SPOOLED} rows that run {RUN} had completed were committed now" in run.printed
    assert (summary.rows_skipped, summary.rows_out) == (COMMITTED + SPOOLED, NUM_ROWS - COMMITTED - SPOOLED)
    check_answers(run, NUM_ROWS)
    assert not Path(run.output, "_pipemax").exists(), "nothing is left of the recorded run"

    append(run, NUM_ROWS, NUM_ROWS + 10)
    night = run.run(incremental=True)
    assert (night.rows_skipped, night.rows_out) == (NUM_ROWS, 10)
    append(run, NUM_ROWS + 10, NUM_ROWS + 15)
    night = run.run(incremental=True)
    assert (night.rows_in, night.rows_out) == (5, 5)
    check_answers(run, NUM_ROWS + 15)


@pytest.mark.long
def test_a_recorded_table_whose_rows_are_searched_for_again_loses_and_doubles_none(run: Jobs) -> None:
    """The input has grown since, so that what the run had prepared is not what is left; its completions count."""
    append(run, NUM_ROWS, NUM_ROWS + 10)
    summary = run.run()
    assert summary.rows_skipped == COMMITTED + SPOOLED
    check_answers(run, NUM_ROWS + 10)


def test_the_history_and_the_specs_of_a_recorded_table_are_read(run: Jobs) -> None:
    table = DeltaTable(run.spark, run.output)
    assert set(table.notes("pipemax claim by run ", since_version=0)) == CLAIMS
    commits = table.commits_since(1)
    assert commits is not None
    assert sorted((commit.note, commit.rows) for commit in commits if commit.note not in CLAIMS) == CHUNKS
    for note, rows in CHUNKS:
        found = table.find_commit(note, since_version=1)
        assert found is not None
        assert found.rows == rows
    ((spec_hash, text),) = spec_texts(table.properties()).items()
    assert AnnotationSpec.from_json(text).hash == spec_hash == SPEC_HASH
    with pytest.raises(JobError, match=r'template was "Say {text}", is "Tell {text}".*--new-spec'):
        run.run(source=PromptSource(template="Tell {text}"))
