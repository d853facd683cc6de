"""``--redo-changed``: a row whose request has changed under its id replaces its old row, exactly once."""

from typing import Any

import pytest

from pipemax_spark.errors import JobError
from pipemax_spark.request.prompts import PromptSource
from tests.fakes.settings import expected_text
from tests.spark.conftest import Jobs
from tests.spark.test_killed_job import committed_chunks, kill_when, start_job
from tests.spark.test_retry_errors import commits_with_rows

SCHEMA = "id long, text string, note string, sampling struct<max_tokens: int>"
IDS = {"id_columns": ("id",), "overrides_column": "sampling"}


def answers(run: Jobs) -> dict[int, tuple[str, str]]:
    """Each id's note and answer or error code; each id once."""
    rows = run.rows()
    found = {
        row["id"]: (row["note"], (row["annotation"]["error"] or {}).get("code") or row["annotation"]["text"])
        for row in rows
    }
    assert len(found) == len(rows)
    return found


def said(text: str, max_tokens: int = 16) -> str:
    return expected_text(f"Say {text}", max_tokens)


@pytest.mark.long  # four jobs
def test_rows_whose_prompt_or_overrides_have_changed_replace_their_old_rows_in_one_commit(run: Jobs) -> None:
    before = [
        (1, "one", "", None),
        (2, "two", "", (16,)),
        (3, None, "", None),
        (4, None, "", None),
        (5, "five", "", None),
    ]
    run.write_input(before, SCHEMA)
    run.run(**IDS)
    now = [
        (1, "one", "the prompt is the same", None),
        (2, "two", "other sampling", (2,)),
        (3, "three", "an error row that was mended", None),
        (4, None, "an error row as it was", None),
        (6, "six", "new", None),
    ]
    run.write_input(now, SCHEMA)
    unchanged = run.run(**IDS, where="id < 6")
    assert (unchanged.rows_out, unchanged.rows_skipped) == (0, 4), "only the option looks for changes"
    num_commits = len(commits_with_rows(run))
    summary = run.run(**IDS, redo_changed=True)
    assert (summary.rows_in, summary.rows_out, summary.rows_skipped) == (5, 3, 2)
    assert "2 rows have changed since they were annotated; each old row stays until" in run.printed
    expected = {
        1: ("", said("one")),
        2: ("other sampling", said("two", 2)),
        3: ("an error row that was mended", said("three")),
        4: ("", "empty_prompt"),
        5: ("", said("five")),
        6: ("new", said("six")),
    }
    assert answers(run) == expected
    (commit,) = commits_with_rows(run)[num_commits:]
    assert (commit["numTargetRowsInserted"], commit["numTargetRowsDeleted"]) == ("3", "2")

    # With --retry-errors too, the unchanged error row is tried again.
    run.write_input([(4, None, "tried again", None), (5, "cinq", "", None)], SCHEMA)
    both = run.run(**IDS, redo_changed=True, retry_errors=True)
    assert (both.rows_out, both.rows_error) == (2, 1)
    assert answers(run) == expected | {4: ("tried again", "empty_prompt"), 5: ("", said("cinq"))}


@pytest.mark.long  # four runs; test_ends has limits, the first test what is redone
def test_changed_rows_are_counted_by_a_dry_run_and_those_beyond_a_limit_stay(run: Jobs) -> None:
    run.write_input([(1, "one", "", None), (2, "two", "", None), (3, "three", "", None)], SCHEMA)
    run.run(**IDS)
    run.write_input([(1, "uno", "", None), (2, "dos", "", None), (3, "three", "", None)], SCHEMA)
    run.dry_run(**IDS, redo_changed=True)
    assert "1 rows done earlier, 2 to do" in run.printed
    assert "2 rows have changed since they were annotated" in run.printed
    for rows_out, left_out in ((1, 1), (1, 0), (0, 0)):
        limited = run.run(**IDS, redo_changed=True, limit=1)
        assert (limited.rows_out, limited.rows_left_out) == (rows_out, left_out)
        assert len(answers(run)) == 3


@pytest.mark.long
def test_a_redo_that_is_killed_loses_no_outcome_and_the_same_command_does_the_rest(run: Jobs) -> None:
    ids = range(3_000)
    run.write_input([(i, f"word {i}") for i in ids])
    run.run(id_columns=("id",))
    before = committed_chunks(run.output)
    run.write_input([(i, f"other {i}") for i in ids])
    job = start_job(run.defaults, "--id-columns", "id", "--redo-changed", commit_every="1s")
    kill_when(lambda: committed_chunks(run.output) > before, job, run.defaults)

    def texts() -> dict[int, str]:
        rows = run.rows()
        assert len(rows) == len(ids), "one outcome for each id"
        assert all(row["annotation"]["text"] == said(row["text"]) for row in rows)
        return {row["id"]: row["text"] for row in rows}

    assert set(texts()) == set(ids)
    num_redone = sum(text.startswith("other") for text in texts().values())
    assert 0 < num_redone < len(ids)
    summary = run.run(id_columns=("id",), redo_changed=True)
    assert summary.rows_skipped >= num_redone
    assert summary.rows_skipped + summary.rows_out == len(ids)
    assert texts() == {i: f"other {i}" for i in ids}


@pytest.mark.long  # a whole job before the refusal
def test_a_table_without_the_columns_of_its_requests_is_refused(run: Jobs) -> None:
    run.write_input([(1, "a")])
    options: dict[str, Any] = {"id_columns": ("id",), "source": PromptSource(prompt_column="text")}
    with pytest.raises(JobError, match="--redo-changed needs --id-columns"):
        run.run(redo_changed=True)
    run.run(**options, select=("id",))
    with pytest.raises(JobError, match=r"output .* lacks a column for it: there is no column 'text'"):
        run.run(**options, redo_changed=True)
    # Once rows bring the column, rows without it count as changed.
    run.write_input([(1, "a"), (2, "b")])
    run.run(**options)
    with pytest.raises(JobError, match="--select lacks a column for it: there is no column 'text'"):
        run.run(**options, redo_changed=True, select=("id",))
    summary = run.run(**options, redo_changed=True)
    assert (summary.rows_out, summary.rows_skipped) == (1, 1)
