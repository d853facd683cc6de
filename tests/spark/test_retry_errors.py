"""``--retry-errors``: an error row stays in the table until its new outcome replaces it."""

import pytest

from pipemax.wire import ErrorCode
from pipemax_spark.errors import OnError
from tests.spark.conftest import Jobs


def outcomes(run: Jobs) -> dict[int, str | None]:
    """Each id's error code; each id once."""
    rows = run.rows()
    found = {row["id"]: row["annotation"]["error"] and row["annotation"]["error"]["code"] for row in rows}
    assert len(found) == len(rows)
    return found


def commits_with_rows(run: Jobs) -> list[dict[str, str]]:
    history = run.spark.sql(f"DESCRIBE HISTORY delta.`{run.output}`").orderBy("version").collect()
    return [
        row["operationMetrics"] for row in history if int(row["operationMetrics"].get("numOutputRows", 0))
    ]


def test_only_error_rows_that_were_retried_leave_the_table_and_in_one_commit_with_their_outcome(
    run: Jobs,
) -> None:
    run.write_input([(1, "fine"), (2, None), (3, "[[error]]"), (4, None)])
    run.run(id_columns=("id",))
    assert outcomes(run) == {
        1: None,
        2: ErrorCode.EMPTY_PROMPT,
        3: ErrorCode.ENGINE_ERROR,
        4: ErrorCode.EMPTY_PROMPT,
    }
    before = len(commits_with_rows(run))

    # Row 4 is no longer in the input, row 5 is new.
    run.write_input([(1, "fine"), (2, "mended"), (3, "[[error]]"), (5, "new")])
    again = run.run(id_columns=("id",), retry_errors=True)
    assert (again.rows_out, again.rows_error, again.rows_skipped) == (3, 1, 1)
    assert outcomes(run) == {
        1: None,
        2: None,
        3: ErrorCode.ENGINE_ERROR,
        4: ErrorCode.EMPTY_PROMPT,
        5: None,
    }
    (commit,) = commits_with_rows(run)[before:]
    assert (commit["numTargetRowsInserted"], commit["numTargetRowsDeleted"]) == ("3", "2")


@pytest.mark.long  # a merge is one commit, above
def test_a_retry_that_fails_leaves_every_error_row_in_place(run: Jobs) -> None:
    run.write_input([(1, "fine"), (2, None), (3, "[[error]]"), (4, None)])
    run.run(id_columns=("id",))
    done = outcomes(run)
    run.write_input([(1, "fine"), (2, "not for long"), (3, "not for long"), (4, None)])
    with pytest.raises(Exception, match="a row failed with empty_prompt"):
        run.run(id_columns=("id",), retry_errors=True, on_error=OnError.FAIL)
    assert outcomes(run) == done
