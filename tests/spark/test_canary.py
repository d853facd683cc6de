"""``--canary``: some random rows first, and the rest only if their answers are like the last run's."""

import itertools
import json
from dataclasses import replace
from pathlib import Path

import pytest

from pipemax.wire import GenerationSpec
from pipemax_spark.errors import CanaryError, JobError, TooManyErrorsError
from pipemax_spark.job import annotation_job
from tests.spark.conftest import Jobs


def texts(first: int, end: int, words: int = 3) -> list[tuple[int, str]]:
    return [(i, f"row {i} {'word ' * (words + i % 5)}") for i in range(first, end)]


def ids(run: Jobs) -> list[int]:
    return sorted(row["id"] for row in run.rows())


@pytest.mark.long  # three jobs
def test_a_canary_unlike_the_last_run_ends_the_run_before_the_rest(run: Jobs) -> None:
    run.write_input(texts(0, 300))
    run.run(id_columns=("id",))
    run.write_input(texts(0, 300) + texts(300, 600, words=12))
    summary = run.directory / "summary.json"
    with pytest.raises(CanaryError, match=r"prompt tokens: .*Nothing else was annotated.*without --canary"):
        run.run(id_columns=("id",), canary=100, summary=str(summary))
    written = json.loads(summary.read_text())
    assert (written["ended_by"], written["complete"]) == ("canary", False)
    committed = len(ids(run)) - 300
    assert (written["rows_out"], written["rows_left"]) == (committed, 300 - committed)
    assert 50 < committed < 160
    page = max(Path(run.directory, "runs").glob("*/report.html"), key=lambda path: path.stat().st_mtime_ns)
    assert "<h2>The canary</h2>" in page.read_text()


@pytest.mark.long  # the comparison is a unit
def test_labels_that_the_engine_would_give_otherwise_now_end_the_run(run: Jobs) -> None:
    run.defaults = replace(
        run.defaults, id_columns=("id",), generation=GenerationSpec(choice=("mild", "spicy"), temperature=0.0)
    )
    run.write_input(texts(0, 400))
    run.run()
    other = "CASE annotation.text WHEN 'mild' THEN 'spicy' ELSE 'mild' END"
    run.spark.sql(f"UPDATE delta.`{run.output}` SET annotation.text = {other} WHERE id % 4 = 0")
    run.write_input(texts(0, 800))
    with pytest.raises(
        CanaryError, match=r"rows asked again: .*another answer 0\.0% before and \d+\.\d% now"
    ):
        run.run(canary=150)


@pytest.mark.long  # the way on, after rows that are alike and after others
def test_a_rerun_is_not_compared_with_the_canary_that_was_stopped(
    run: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = itertools.count(
        1
    )  # a run's id decides which rows are drawn, and one draw in a hundred looks unlike
    monkeypatch.setattr(annotation_job, "new_run_id", lambda: f"20261128T{next(numbers):06}-00000000")
    run.write_input(texts(0, 300))
    run.run(id_columns=("id",))
    run.write_input(texts(0, 600))
    alike = run.run(id_columns=("id",), canary=100)
    assert (alike.complete, alike.rows_out, alike.canary["moved"]) == (True, 300, [])
    assert 50 < alike.canary["rows"] < 160
    assert ids(run) == [*range(600)]
    run.write_input(texts(0, 600) + texts(600, 900, words=12))
    for _ in range(2):
        with pytest.raises(CanaryError, match="prompt tokens"):
            run.run(id_columns=("id",), canary=100)
    accepted = run.run(id_columns=("id",))
    assert accepted.complete
    run.write_input(texts(0, 600) + texts(600, 1_200, words=12))
    assert run.run(id_columns=("id",), canary=100).canary["moved"] == []
    assert ids(run) == [*range(1_200)]


@pytest.mark.long
def test_a_canary_of_errors_ends_the_run_and_one_of_all_rows_is_none(run: Jobs) -> None:
    run.write_input([(i, "[[error]]") for i in range(400)])
    with pytest.raises(TooManyErrorsError, match=r"of the canary failed.*Nothing else was annotated"):
        run.run(id_columns=("id",), canary=60)
    assert len(ids(run)) < 150
    run.write_input(texts(400, 450))
    assert run.run(id_columns=("id",), canary=60).canary is None


def test_a_canary_of_a_few_rows_or_of_retried_errors_is_refused(run: Jobs) -> None:
    with pytest.raises(JobError, match="at least 50 rows"):
        run.run(canary=5)
    with pytest.raises(JobError, match="--retry-errors does again"):
        run.run(canary=500, retry_errors=True)
