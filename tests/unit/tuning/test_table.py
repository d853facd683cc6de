"""What is known of a table's rows, and the limits that follow."""

import numpy as np
import pytest

from pipemax.domain.specs import KvCapacity
from pipemax.domain.step_records import StepLimits
from pipemax.tuning.table import (
    Envelope,
    Lengths,
    row_candidates,
    steady_step_tokens,
    sweep_limits,
    token_candidates,
)
from tests.unit.tuning.synthetic_engine import CEILING, DEFAULT, envelope


def lengths(prompt: int, output: int, *, found: int = 0, count: int = 100) -> Lengths:
    return Lengths(
        prompt_tokens=np.full(count, prompt),
        output_tokens=np.full(count, output),
        found_tokens=np.full(count, found),
    )


def test_a_steady_step_has_the_prompts_of_the_rows_that_begin() -> None:
    assert steady_step_tokens(100, lengths(300, 100)) == 400
    assert steady_step_tokens(100, lengths(300, 100, found=200)) == 200


def test_rows_fit_by_half_of_their_outputs() -> None:
    room = Envelope(
        default=DEFAULT,
        ceiling=CEILING,
        capacity=KvCapacity(block_tokens=16, gpu_blocks=1000, host_blocks=0),
    )
    assert room.rows_that_fit(lengths(300, 184)) == pytest.approx(16_000 / 400)


def test_long_rows_run_for_longer_and_hold_more_of_the_kv_at_a_time() -> None:
    both = lengths(100, 10, count=90).joined(lengths(100, 1000, count=10), max_rows=100)
    steps_of_short, steps_of_long = 90 * 10, 10 * 1000
    held = steps_of_short * (100 + 10 / 2) + steps_of_long * (100 + 1000 / 2)
    assert both.mean_kv == pytest.approx(held / (steps_of_short + steps_of_long))


@pytest.mark.parametrize("steps", [400, 800])
def test_rows_that_still_run_make_up_for_the_short_ones_ending_first(steps: int) -> None:
    """Of 20,000 rows, 200 run at once; each has a token in a step, and the next begins where one ends."""
    rng = np.random.default_rng(0)
    table = np.maximum(1, rng.lognormal(4.6, 0.8, 20_000)).astype(np.int64)
    ended, running = list[int](), list[int]()
    for slot in table.reshape(200, 100):
        ends = np.cumsum(slot)
        count = int(np.searchsorted(ends, steps, side="right"))
        ended += slot[:count].tolist()
        running.append(steps - int(ends[count - 1]) if count else steps)
    first = Lengths(prompt_tokens=np.full(len(ended), 50), output_tokens=np.array(ended))
    rows, longer = first.of_the_table(np.array(running))
    assert len(rows) == len(first)
    assert longer < 0.06
    assert first.mean_output < 0.93 * table.mean(), "the short rows ended first"
    assert rows.mean_output == pytest.approx(table.mean(), rel=0.05)
    assert rows.mean_kv == pytest.approx(
        Lengths(prompt_tokens=np.full(20_000, 50), output_tokens=table).mean_kv, rel=0.12
    )


def test_lengths_stay_where_no_row_runs_and_nothing_is_known_before_one_ended() -> None:
    rows, longer = lengths(300, 100).of_the_table(np.zeros(0, dtype=np.int64))
    assert (rows.output_tokens.tolist(), longer) == ([100] * 100, pytest.approx(0.0))
    assert Lengths().of_the_table(np.array([5, 6]))[1] == 1.0


def test_limits_are_cut_to_what_the_engine_can_take() -> None:
    room = envelope()
    assert room.limits(1e9, 1e9) == CEILING
    assert room.limits(1, 1) == StepLimits(step_tokens=64, running_rows=1)
    assert room.limits(100, 203) == StepLimits(step_tokens=200, running_rows=200)


def test_candidates_differ_in_rows_first_and_then_in_tokens() -> None:
    by_rows = row_candidates(envelope(), lengths(320, 160))
    assert by_rows[0] == DEFAULT
    assert len({limits.running_rows for limits in by_rows}) == len(by_rows) == 7
    by_tokens = token_candidates(envelope(), lengths(320, 160), 224)
    assert {limits.running_rows for limits in by_tokens} == {224}
    assert len({limits.step_tokens for limits in by_tokens}) == len(by_tokens) == 4


def test_the_sweep_knows_nothing_of_lengths_at_first() -> None:
    assert sweep_limits(envelope(), Lengths(), 0.5, 0.5) == StepLimits(step_tokens=1024, running_rows=128)
    assert sweep_limits(envelope(), lengths(320, 160), 0.5, 0.5).running_rows == 112


def test_the_sweep_has_steps_of_the_default_size_with_each_number_of_rows() -> None:
    for share in (0.25, 0.5, 1.0):
        limits = sweep_limits(envelope(), lengths(320, 160), share, None)
        assert limits.step_tokens == DEFAULT.step_tokens


def test_the_last_rows_are_kept() -> None:
    both = lengths(1, 1, count=3).joined(lengths(2, 2, count=2), max_rows=4)
    assert both.prompt_tokens.tolist() == [1, 1, 2, 2]


def test_bad_values_are_refused() -> None:
    with pytest.raises(ValueError, match="exceeds the ceiling"):
        Envelope(default=CEILING, ceiling=DEFAULT, capacity=envelope().capacity)
    with pytest.raises(ValueError, match="least_step_tokens"):
        Envelope(default=DEFAULT, ceiling=CEILING, capacity=envelope().capacity, least_step_tokens=10_000)
    with pytest.raises(ValueError, match="output lengths"):
        Lengths(prompt_tokens=np.ones(2), output_tokens=np.ones(3))
    with pytest.raises(ValueError, match="at least 1"):
        StepLimits(step_tokens=0, running_rows=1)
