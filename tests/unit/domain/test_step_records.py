"""Limits of steps and the records of steps: bad values are refused, and records survive their way."""

import json
from dataclasses import replace

import numpy as np
import pytest

from pipemax.domain.step_records import StepLimits, StepRecords


def records(*seconds: float | None, dropped: int = 0) -> StepRecords:
    """Steps that are told apart by their seconds."""
    counts = [int(10 * (second or 0)) for second in seconds]
    names = ("prompt_tokens", "decodes", "kv_tokens", "running", "waiting", "preempted")
    return StepRecords.from_plain({**dict.fromkeys(names, counts), "seconds": seconds, "dropped": dropped})


def test_limits_below_one_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="running_rows is 0, must be at least 1"):
        StepLimits(step_tokens=8, running_rows=0)
    with pytest.raises(ValueError, match="step_tokens is -1, must be at least 1"):
        StepLimits(step_tokens=-1, running_rows=8)


def test_limits_are_cut_to_those_that_an_engine_began_with() -> None:
    ceiling = StepLimits(step_tokens=100, running_rows=10)
    assert StepLimits(step_tokens=200, running_rows=5).within(ceiling) == StepLimits(
        step_tokens=100, running_rows=5
    )


def test_arrays_of_other_lengths_are_refused_with_the_lengths() -> None:
    with pytest.raises(ValueError, match=r"not of equal length.*'decodes': 1.*'seconds': 0"):
        StepRecords.from_plain({"decodes": [1]})


def test_records_are_as_before_after_json_and_a_gap_stays_one() -> None:
    before = records(None, 0.5, 0.25, dropped=3)
    after = StepRecords.from_plain(json.loads(json.dumps(before.to_plain(), allow_nan=False)))
    assert after.to_plain() == before.to_plain()
    assert after.dropped == 3
    assert np.isnan(after.seconds[0])
    assert after.decodes.tolist() == [0, 5, 2]


def test_the_outputs_of_rows_that_run_are_those_of_the_newest_records() -> None:
    first, second = (
        replace(records(0.1), outputs_so_far=np.array(outputs)) for outputs in ([5, 1], [6, 2, 1])
    )
    assert StepRecords.joined([first, second, StepRecords.none()]).outputs_so_far.tolist() == [6, 2, 1]
    assert StepRecords.from_plain(first.to_plain()).outputs_so_far.tolist() == [5, 1]


def test_joined_records_keep_the_newest_steps_and_count_the_others() -> None:
    joined = StepRecords.joined([records(0.1, 0.2, dropped=1), StepRecords.none(), records(0.3)], newest=2)
    assert joined.seconds.tolist() == [0.2, 0.3]
    assert joined.dropped == 2
    assert len(StepRecords.joined([])) == 0
