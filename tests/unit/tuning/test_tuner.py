"""The tuner drives a synthetic engine."""

from dataclasses import replace
from itertools import count, pairwise

import numpy as np
import pytest

from pipemax.domain.step_records import StepLimits, StepRecords
from pipemax.tuning.step_fit import WorkCosts
from pipemax.tuning.table import SWEEP_ROWS, SWEEP_TOKENS, Lengths
from pipemax.tuning.tuner import Stage, Start, Tuner, TuningRules
from tests.unit.tuning.synthetic_engine import (
    CEILING,
    DEFAULT,
    OUTPUT,
    PROMPT,
    SyntheticEngine,
    compute_bound,
    drive,
    envelope,
    memory_bound,
    starved,
)

HOUR_S = 3600.0
COSTS = WorkCosts(prompt_token_s=1e-5, decode_s=1e-5, kv_token_s=1e-9, prompts_per_output=2.0)
LARGE = StepLimits(step_tokens=2048, running_rows=224)


def best_rate(engine: SyntheticEngine) -> float:
    return max(
        engine.rate(StepLimits(step_tokens=tokens, running_rows=rows))
        for rows in (16, 32, 64, 128, 192, 224, 256)
        for tokens in (256, 512, 1024, 2048, 4096)
    )


@pytest.fixture(scope="module")
def tuning() -> tuple[SyntheticEngine, Tuner]:
    """A long table on an engine that gains by more rows, tuned to the end."""
    engine, tuner = SyntheticEngine(memory_bound), Tuner(envelope())
    drive(tuner, [engine], 10 * HOUR_S)
    return engine, tuner


def test_it_finds_the_best_limits_and_says_what_they_gain(tuning: tuple[SyntheticEngine, Tuner]) -> None:
    engine, tuner = tuning
    assert tuner.tuned is not None
    assert engine.rate(tuner.tuned.limits) >= 0.96 * best_rate(engine)
    gain = tuner.tuned.gain
    assert gain is not None
    truth = np.log(engine.rate(tuner.tuned.limits) / engine.rate(DEFAULT))
    assert gain.low <= truth <= gain.high
    assert tuner.tuned.pairs >= 2
    assert str(tuner.tuned).startswith("Tuned: steps of ")
    assert "over vLLM's default" in str(tuner.tuned)


def test_where_nothing_is_to_be_won_the_default_stays_within_two_minutes() -> None:
    engine, tuner = SyntheticEngine(compute_bound), Tuner(envelope())
    drive(tuner, [engine], 10 * HOUR_S)
    assert tuner.tuned is not None
    assert tuner.tuned.is_default
    assert "within reach" in tuner.tuned.why
    assert engine.now_s <= 120


def test_a_gain_that_only_the_simulation_sees_does_not_win_the_race() -> None:
    """Above 77 rows each step takes three times as long, which a fit by pieces that never jump cannot see."""

    def with_a_cliff(decodes: float, prompts: float, kv_tokens: float) -> float:
        return memory_bound(decodes, prompts, kv_tokens) * (1.0 if decodes < 78 else 3.0)

    for seed in range(2):
        engine, tuner = SyntheticEngine(with_a_cliff, seed=seed), Tuner(envelope())
        drive(tuner, [engine], 10 * HOUR_S)
        assert tuner.tuned is not None
        assert engine.rate(tuner.tuned.limits) >= 0.98 * engine.rate(DEFAULT), tuner.tuned


def test_a_simulated_gain_is_confirmed_in_a_few_pairs_where_a_race_takes_too_long() -> None:
    engine, tuner = SyntheticEngine(memory_bound), Tuner(envelope())
    drive(tuner, [engine], 0.75 * HOUR_S)
    assert tuner.tuned is not None
    assert not tuner.tuned.is_default
    assert 1 <= tuner.tuned.pairs <= TuningRules().fewest_pairs
    assert tuner.tuned.gain is not None
    assert engine.rate(tuner.tuned.limits) >= 0.96 * best_rate(engine)


def test_the_wait_for_rows_to_end_is_the_first_block_of_the_default() -> None:
    engine, tuner, first_raced = SyntheticEngine(memory_bound), Tuner(envelope()), list[StepLimits]()

    def with_long_rows(records: StepRecords) -> StepRecords:
        if tuner.stage is Stage.RACE and not first_raced:
            first_raced.append(engine.limits)
        running = np.full(1000, 10**6 if engine.now_s < 300 else 1)
        return replace(records, outputs_so_far=running)

    drive(tuner, [engine], 0.75 * HOUR_S, with_long_rows)
    assert tuner.tuned is not None
    assert tuner.tuned.seconds > 300, "a row that runs may be longer than all that ended"
    assert first_raced == [tuner.tuned.limits]
    assert not tuner.tuned.is_default
    assert engine.rate(tuner.tuned.limits) >= 0.96 * best_rate(engine)


@pytest.mark.parametrize("seed", range(3))
def test_a_large_simulated_gain_that_the_pairs_do_not_show_is_left(seed: int) -> None:
    def with_a_cliff(decodes: float, prompts: float, kv_tokens: float) -> float:
        return memory_bound(decodes, prompts, kv_tokens) * (1.0 if decodes < 210 else 4.0)

    engine, tuner = SyntheticEngine(with_a_cliff, seed=seed), Tuner(envelope())
    drive(tuner, [engine], 0.75 * HOUR_S)
    assert tuner.tuned is not None
    assert engine.rate(tuner.tuned.limits) >= 0.98 * engine.rate(DEFAULT), tuner.tuned


def test_a_short_table_runs_under_the_limits_it_starts_with() -> None:
    engine, tuner = SyntheticEngine(memory_bound), Tuner(envelope(), start=Start(limits=LARGE))
    drive(tuner, [engine], 600.0)
    assert tuner.tuned is not None
    assert tuner.tuned.limits == LARGE
    assert set(engine.seen) == {LARGE}


@pytest.mark.parametrize("hours", [0.5, 1.0, 3.0, 50.0])
def test_the_budget_is_never_exceeded(hours: float) -> None:
    tuner = Tuner(envelope())
    seconds = drive(tuner, [SyntheticEngine(memory_bound, noise=0.08, seed=4)], hours * HOUR_S)
    assert tuner.tuned is not None
    race_s, large_s, a_call_s = min(900.0, 0.05 * hours * HOUR_S), 0.2 * hours * HOUR_S, 1.5
    assert seconds <= (large_s if hours <= 1 else race_s) + a_call_s


def test_a_gain_that_is_not_large_is_tried_within_a_twentieth_of_the_table() -> None:
    def with_a_small_gain(decodes: float, prompts: float, kv_tokens: float) -> float:
        return 0.0010 + 4e-4 * (decodes + prompts) + 4e-9 * kv_tokens

    tuner = Tuner(envelope(), rules=TuningRules(worth=0.0, large=0.1))
    seconds = drive(tuner, [SyntheticEngine(with_a_small_gain, seed=4)], 1.5 * HOUR_S)
    assert tuner.tuned is not None
    assert tuner.tuned.pairs >= 1
    assert seconds <= 0.05 * 1.5 * HOUR_S + 1.5


def test_no_limit_exceeds_the_ceiling_or_leaves_a_row_without_a_token(
    tuning: tuple[SyntheticEngine, Tuner],
) -> None:
    for limits in tuning[0].seen:
        assert limits.step_tokens <= CEILING.step_tokens
        assert limits.running_rows <= min(CEILING.running_rows, limits.step_tokens)


def test_the_sweep_adds_rows_from_setting_to_setting(tuning: tuple[SyntheticEngine, Tuner]) -> None:
    sweep = list(dict.fromkeys(tuning[0].seen[:80]))
    rows = [
        limits.running_rows
        for limits in sweep[: len(SWEEP_ROWS) * len(set(SWEEP_TOKENS))]
        if limits != DEFAULT
    ]
    assert len(rows) >= 7
    assert max(rows) >= 3 * min(rows)
    assert all(later >= 0.8 * earlier for earlier, later in pairwise(rows)), "lengths are learnt on the way"


def test_blocks_in_which_rows_were_missing_are_repeated() -> None:
    engine, tuner, calls = SyntheticEngine(memory_bound), Tuner(envelope()), count()

    def hungry(records: StepRecords) -> StepRecords:
        return starved(records) if tuner.stage is Stage.RACE and next(calls) < 40 else records

    drive(tuner, [engine], 10 * HOUR_S, hungry)
    assert tuner.faults
    assert set(tuner.faults) == {"too few rows were waiting"}
    assert tuner.tuned is not None
    assert engine.rate(tuner.tuned.limits) >= 0.96 * best_rate(engine)


def test_a_race_without_a_usable_block_ends_with_the_default() -> None:
    tuner = Tuner(envelope())

    def hungry(records: StepRecords) -> StepRecords:
        return starved(records) if tuner.stage is Stage.RACE else records

    seconds = drive(tuner, [SyntheticEngine(memory_bound)], 10 * HOUR_S, hungry)
    assert tuner.tuned is not None
    assert tuner.tuned.is_default
    assert "too few rows were waiting" in tuner.tuned.why
    assert seconds < 300


def test_a_remembered_tuning_is_checked_by_two_pairs() -> None:
    engine = SyntheticEngine(memory_bound)
    tuner = Tuner(envelope(), start=Start(limits=LARGE, costs=COSTS))
    assert tuner.stage is Stage.CHECK
    seconds = drive(tuner, [engine], 2 * HOUR_S)
    assert tuner.tuned is not None
    assert (tuner.tuned.limits, tuner.tuned.pairs, tuner.tuned.why) == (LARGE, 2, "remembered")
    assert seconds <= 90
    assert set(engine.seen) == {LARGE, DEFAULT}


def test_a_remembered_tuning_that_loses_is_tuned_again() -> None:
    small = StepLimits(step_tokens=64, running_rows=16)
    engine = SyntheticEngine(memory_bound)
    tuner = Tuner(envelope(), start=Start(limits=small, costs=COSTS))
    drive(tuner, [engine], 10 * HOUR_S)
    assert tuner.tuned is not None
    assert engine.rate(tuner.tuned.limits) >= 0.96 * best_rate(engine)


def test_a_remembered_default_settles_at_once() -> None:
    tuner = Tuner(envelope(), start=Start(limits=DEFAULT, costs=COSTS))
    assert tuner.tuned is not None
    assert tuner.tuned.is_default


def test_replicas_cross_over_so_that_a_slow_gpu_decides_nothing() -> None:
    for slow_first in (False, True):
        speeds = (0.7, 1.0) if slow_first else (1.0, 0.7)
        engines = [SyntheticEngine(memory_bound, speed=speed, seed=7) for speed in speeds]
        tuner = Tuner(envelope(), num_replicas=2)
        drive(tuner, engines, 10 * HOUR_S)
        assert tuner.tuned is not None
        assert tuner.tuned.gain is not None
        truth = np.log(engines[0].rate(tuner.tuned.limits) / engines[0].rate(DEFAULT))
        assert tuner.tuned.gain.mean == pytest.approx(truth, abs=0.03)
    raced = [pair for pair in zip(*(engine.seen for engine in engines), strict=True) if DEFAULT in pair]
    opposite = [pair for pair in raced if pair[0] != pair[1]]
    assert {pair.index(DEFAULT) for pair in opposite} == {0, 1}


def test_more_replicas_sweep_sooner() -> None:
    seconds = []
    for num_replicas in (1, 4):
        tuner = Tuner(envelope(), num_replicas=num_replicas)
        engines = [SyntheticEngine(compute_bound, seed=seed) for seed in range(num_replicas)]
        seconds.append(drive(tuner, engines, 10 * HOUR_S))
    assert seconds[1] < seconds[0] / 2


def test_too_long_rows_are_not_predicted_before_enough_have_ended() -> None:
    engine, tuner = SyntheticEngine(memory_bound), Tuner(envelope())
    for _ in range(200):
        steps, _ = engine.advance()
        (engine.limits,) = tuner.observe([steps], Lengths(), expected_s=10 * HOUR_S)
    assert tuner.stage is Stage.MODEL
    assert engine.limits == DEFAULT
    rows = np.full(100, PROMPT), np.full(100, OUTPUT)
    tuner.observe([steps], Lengths(prompt_tokens=rows[0], output_tokens=rows[1]), expected_s=10 * HOUR_S)
    drive(tuner, [engine], 10 * HOUR_S)
    assert tuner.tuned is not None


def test_records_of_another_number_of_replicas_are_refused() -> None:
    with pytest.raises(ValueError, match="records of 0 replicas, but there are 1"):
        Tuner(envelope()).observe([], Lengths(), expected_s=1.0)
    with pytest.raises(ValueError, match="num_replicas"):
        Tuner(envelope(), num_replicas=0)


def test_rules_of_a_budget() -> None:
    rules = TuningRules()
    assert rules.budget_s(HOUR_S) == pytest.approx(180.0)
    assert rules.budget_s(100 * HOUR_S) == pytest.approx(900.0)
