"""Runs that end at a limit on cost, time or tokens, and the runs after them."""

import json
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from pipemax_spark.job.annotation_job import AnnotationJob
from pipemax_spark.report.summary import Summary
from pipemax_spark.request.questions import read_questions
from pipemax_spark.rows import chunks
from tests.fakes.settings import expected_text, fake_config
from tests.spark.conftest import Jobs, Nights, words
from tests.spark.test_killed_job import rows_in_spool, start_job
from tests.waiting import wait_until


def limited(run: Jobs, clock_s: Callable[[], float], **changes: Any) -> Summary:
    """Run the job at this clock; return its summary."""
    with run.terminal() as terminal:
        options = replace(run.defaults, **changes)
        summary = AnnotationJob(run.spark, options, terminal, clock_s=clock_s).run()
    assert summary is not None
    return summary


def has_committed_a_chunk(run: Jobs) -> bool:
    commits = Path(run.output, "_delta_log").glob("*.json")
    return any("(slices " in commit.read_text() for commit in commits)


def has_each_row_once(run: Jobs, rows: list[tuple[int, str]]) -> bool:
    done = [row for row in run.rows() if row["id"] < len(rows)]
    assert all(row["annotation"]["text"] == expected_text(f"Say {row['text']}", 16) for row in done)
    return Counter((row["id"], row["text"]) for row in done) == Counter(rows)


@pytest.mark.long  # three runs; the decisions are units
def test_no_chunk_begins_that_would_not_end_and_the_next_run_does_the_rest(
    run: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunks, "_MIN_FIRST_ROWS_PER_SLOT", 20)  # so that there are several
    rows = words(0, 6_000)
    run.write_input(rows)
    run.defaults = replace(
        run.defaults,
        engine=fake_config(tokens_per_s=10_000),
        commit_every=timedelta(seconds=1),
        id_columns=("id",),
        summary=str(run.directory / "summary.json"),
    )

    seconds = iter([0.0])
    summary = limited(run, lambda: next(seconds, 7_200.0), max_hours=1.0)
    assert (summary.ended_by, summary.rows_out, summary.rows_left) == ("max_hours", 0, 6_000)
    assert run.rows() == [], "nothing has begun"

    # Once the first chunk is committed, five seconds are left.
    summary = limited(
        run,
        lambda: 3_596.0 if has_committed_a_chunk(run) else 1.0,
        max_cost=200.0,
        price_per_hour=200.0,
    )
    done = summary.rows_out
    assert 0 < done < 6_000
    assert (summary.complete, summary.rows_left, summary.ended_by) == (False, 6_000 - done, "max_cost")
    told = json.loads((run.directory / "summary.json").read_text())
    assert (told["complete"], told["rows_left"], told["ended_by"]) == (False, 6_000 - done, "max_cost")
    assert run.printed.splitlines()[-1] == (
        "Warning: --max-cost 200 leaves too little for another chunk (60 min since the job's start, cost 199.72, "
        f"{run.printed.rpartition('cost 199.72, ')[2].partition(' tokens')[0]} tokens); {6_000 - done:,} of 6,000 "
        "rows are left. Run the same command again to go on, from what engines had completed"
    )
    assert re.search(rf"^Still to do +{6_000 - done:,} \(ended by max_cost\)$", run.printed, re.M)
    assert len(run.rows()) == done, "each chunk that has begun is committed"

    summary = limited(run, lambda: 0.0, max_hours=1.0)
    assert (summary.complete, summary.rows_skipped, summary.ended_by) == (True, done, "done")
    assert has_each_row_once(run, rows)


@pytest.mark.long  # a stopped run and its spool, as of any death
def test_at_the_limit_the_engine_drops_its_rows_and_what_it_had_completed_is_kept(run: Jobs) -> None:
    rows = words(0, 600)
    run.write_input(rows)
    held, work = run.directory / "held", Path(run.output, "_pipemax")
    held.touch()
    run.defaults = replace(run.defaults, engine=fake_config(held_by=str(held), held_row_s=0.5), max_hours=1.0)
    summary = limited(run, lambda: 3_600.0 if rows_in_spool(work) else 0.0)
    assert (summary.ended_by, summary.rows_out, summary.rows_left) == ("max_hours", 0, 600)
    assert "--max-hours 1 is reached" in run.printed
    kept = rows_in_spool(work)
    held.unlink()

    run.write_input([*rows, (600, "[[counts]]")])
    summary = limited(run, lambda: 0.0)
    assert "had completed were committed now" in run.printed
    # A cancelled task may write down a row more before its worker ends.
    assert kept <= summary.rows_skipped < 600
    assert (summary.complete, summary.rows_out) == (True, 601 - summary.rows_skipped)
    [counts] = [row["annotation"]["text"] for row in run.rows() if row["id"] == 600]
    assert json.loads(counts)["aborted"] > 0
    assert has_each_row_once(run, rows)


@pytest.mark.long  # nights; what ends them is the same
def test_a_night_that_ends_at_its_limit_is_gone_on_with_by_the_next(nights: Nights) -> None:
    run = nights.jobs
    nights.append(words(0, 300))
    nights.run(id_columns=("id",))
    nights.append(words(300, 400))
    options = {"input": nights.input, "incremental": True, "id_columns": ("id",), "max_hours": 1.0}
    seconds = iter([0.0])
    summary = limited(run, lambda: next(seconds, 7_200.0), **options)
    assert (summary.complete, summary.rows_left, summary.ended_by) == (False, None, "max_hours")
    assert "100 of 100 rows are left" in run.printed
    nights.append(words(400, 410))
    summary = limited(run, lambda: 0.0, **options)
    assert (summary.complete, summary.rows_in, summary.rows_out) == (True, 110, 110)
    assert has_each_row_once(run, words(0, 410))


@pytest.mark.long  # its decisions are in the units
def test_the_tokens_of_a_run_are_foretold_by_the_sample_and_counted_over_all_questions(run: Jobs) -> None:
    run.write_input(words(0, 400))
    question = "Is it good?"
    run.defaults = replace(
        run.defaults,
        id_columns=("id",),
        ask=read_questions({"good": question, "bad": question}, run.defaults.generation),
    )
    summary = limited(run, lambda: 0.0, max_tokens_total=1_000)
    assert summary.ended_by == "max_tokens_total"
    assert "max-tokens-total 1,000: at most" in run.printed
    assert limited(run, lambda: 0.0, max_tokens_total=1_000_000).complete
    assert sorted(row["id"] for row in run.rows()) == list(range(400))


@pytest.mark.long  # a process; the units show the statuses
def test_the_command_ends_with_status_3(run: Jobs) -> None:
    run.write_input(words(0, 50))
    job = start_job(run.defaults, "--max-hours", "0.00001", commit_every="1h")
    wait_until(lambda: job.poll() is not None, 300, "the end of the job")
    assert job.wait() == 3
    job = start_job(run.defaults, "--max-hours", "0.00001", "--budget-is-success", commit_every="1h")
    wait_until(lambda: job.poll() is not None, 300, "the end of the job")
    assert job.wait() == 0
