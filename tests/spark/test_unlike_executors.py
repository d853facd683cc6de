"""Two executors of unlike speed in one job: rows go to each in proportion to its speed, and both end together."""

from pathlib import Path

import pytest

from tests.spark.unlike_application import engines_of, launch, outcome_of, reports_of

_ROWS = 4_000
_SPEEDS = (3.0, 1.0)


@pytest.mark.long  # it takes minutes, and shares of the rows are those of the engines' speeds only on a quiet machine
def test_rows_go_to_each_engine_by_its_speed_and_both_end_together(tmp_path: Path) -> None:
    # Little room, so that partitions are small next to the table, as they are in a table of hours.
    application = launch(
        tmp_path,
        rows=_ROWS,
        nodes=2,
        speeds=_SPEEDS,
        slots=2,
        commit_every_s=4.0,
        room_rows=20,
        chunk_rows=16,
    )
    try:
        assert application.wait(timeout=600) == 0
    finally:
        application.kill()
    outcome = outcome_of(tmp_path)
    assert (outcome["rows_out"], outcome["rows_error"], outcome["distinct_ids"]) == (_ROWS, 0, _ROWS)
    fast, slow = engines_of(reports_of(tmp_path))
    assert (fast.speed, slow.speed) == _SPEEDS
    assert fast.rows + slow.rows == _ROWS
    # An even division would be 1, and leave the fast engine idle for two thirds of the slow one's time.
    assert fast.rows / slow.rows == pytest.approx(3.0, rel=0.3)
    assert abs(fast.last_row_s - slow.last_row_s) < 0.25 * max(fast.last_row_s, slow.last_row_s)
