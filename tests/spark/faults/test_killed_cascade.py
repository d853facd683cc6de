"""A job with ``--cascade`` that is killed in several phases ends as one that was never disturbed."""

from pathlib import Path

import pytest

from tests.spark.faults.cascade_kills import strike


@pytest.mark.long  # five runs of the command
def test_a_killed_cascade_ends_with_its_first_records_and_each_row_once(tmp_path: Path) -> None:
    job = strike(tmp_path, kills=4, seed=5)
    assert job.faults == []
    assert job.records.keys() == {"draw", "pilot", "certificate"}
