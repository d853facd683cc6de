"""Step times are found again in records of steps."""

from dataclasses import replace

import numpy as np
import pytest

from pipemax.domain.step_records import StepRecords
from pipemax.domain.step_times import mixed_step_s
from pipemax.tuning.step_fit import StepFit, fit_steps


def true_s(decodes: np.ndarray, prompts: np.ndarray, kv_tokens: np.ndarray) -> np.ndarray:
    tokens = decodes + prompts
    return (
        0.01
        + 2e-6 * np.minimum(tokens, 512)
        + 2e-5 * np.maximum(tokens - 512, 0)
        + 3e-5 * decodes
        + 2e-8 * kv_tokens
    )


def records(count: int, *, noise: float = 0.03, seed: int = 0) -> StepRecords:
    rng = np.random.default_rng(seed)
    decodes = rng.integers(1, 600, count)
    prompts = np.where(rng.random(count) < 0.3, 0, rng.integers(0, 6000, count))
    kv_tokens = decodes * rng.integers(200, 900, count)
    seconds = true_s(decodes, prompts, kv_tokens) * np.exp(noise * rng.standard_normal(count))
    zeros = np.zeros(count, dtype=np.int64)
    return StepRecords(
        prompt_tokens=prompts,
        decodes=decodes,
        kv_tokens=kv_tokens,
        running=decodes,
        waiting=zeros,
        preempted=zeros,
        seconds=seconds,
    )


def predicted_s(fit: StepFit, decodes: int, prompts: int, kv_tokens: int) -> float:
    return mixed_step_s(
        fit.stage.decode_time,
        fit.stage.prefill_time,
        num_decodes=decodes,
        kv_tokens=kv_tokens,
        prompt_tokens=prompts,
        token_pairs=0,
    )


STEPS = [
    (1, 0, 500),
    (64, 0, 30_000),
    (500, 0, 300_000),
    (10, 3000, 5000),
    (400, 5000, 200_000),
    (600, 8000, 400_000),
]


@pytest.mark.parametrize("step", STEPS)
def test_steps_are_predicted_within_three_percent_of_the_truth(step: tuple[int, int, int]) -> None:
    fit = fit_steps(records(3000), prompts_per_output=2.0)
    assert fit is not None
    decodes, prompts, kv_tokens = (np.array(part) for part in step)
    assert predicted_s(fit, *step) == pytest.approx(float(true_s(decodes, prompts, kv_tokens)), rel=0.03)


def test_a_jump_behind_a_full_tile_is_seen() -> None:
    steps = records(3000, noise=0.01)
    beyond = (steps.decodes + steps.prompt_tokens > 256).astype(float)
    fit = fit_steps(replace(steps, seconds=steps.seconds + 0.004 * beyond), prompts_per_output=2.0)
    assert fit is not None
    jump_s = predicted_s(fit, 257, 0, 100_000) - predicted_s(fit, 256, 0, 100_000)
    assert jump_s == pytest.approx(0.004, rel=0.15)


def test_stalled_steps_and_idle_gaps_do_not_move_the_fit() -> None:
    clean = records(3000)
    seconds = clean.seconds.copy()
    seconds[::50] *= 20
    seconds[7::50] = np.nan
    fit, spoilt = (
        fit_steps(steps, prompts_per_output=2.0) for steps in (clean, replace(clean, seconds=seconds))
    )
    assert fit is not None
    assert spoilt is not None
    for step in STEPS:
        assert predicted_s(spoilt, *step) == pytest.approx(predicted_s(fit, *step), rel=0.03)


def test_a_speed_that_changes_over_seconds_does_not_move_the_fit() -> None:
    """The engine is 4 % faster or slower for ten seconds at a time; most of its large steps fall into slow ones."""
    rng = np.random.default_rng(3)
    steps = records(3000, noise=0.0)
    large = steps.prompt_tokens > 2500
    order = np.argsort(np.where(rng.random(3000) < 0.7, large, ~large), kind="stable")
    seconds = steps.seconds[order]
    speed = np.where(np.cumsum(seconds) < seconds.sum() / 2, 0.96, 1.04)
    drifting = replace(
        steps,
        prompt_tokens=steps.prompt_tokens[order],
        decodes=steps.decodes[order],
        kv_tokens=steps.kv_tokens[order],
        seconds=seconds * speed,
    )
    fit = fit_steps(drifting, prompts_per_output=2.0)
    assert fit is not None
    one, other = (STEPS[2], STEPS[5])
    truth = [float(true_s(*(np.array(part) for part in step))) for step in (one, other)]
    ratio = predicted_s(fit, *other) / predicted_s(fit, *one)
    assert ratio == pytest.approx(truth[1] / truth[0], rel=0.01)


def test_fewer_steps_make_a_larger_error() -> None:
    fits = [fit_steps(records(count), prompts_per_output=2.0) for count in (100, 3000)]
    errors = [0.0 if fit is None else fit.error for fit in fits]
    assert 0.005 < errors[0] < 0.02
    assert errors[1] < errors[0] / 4


def test_costs_are_those_of_one_more_token() -> None:
    fit = fit_steps(records(3000, noise=0.0), prompts_per_output=2.0)
    assert fit is not None
    costs = fit.costs
    assert costs.prompt_token_s == pytest.approx(2e-5, rel=0.1)
    assert costs.decode_s == pytest.approx(5e-5, rel=0.1)
    assert costs.kv_token_s == pytest.approx(2e-8, rel=0.1)


def test_costs_are_positive_where_tokens_are_free() -> None:
    steps = records(500)
    fit = fit_steps(replace(steps, seconds=np.full(500, 0.01)), prompts_per_output=2.0)
    assert fit is not None
    assert min(fit.costs.prompt_token_s, fit.costs.decode_s) > 0


def test_too_few_steps_are_not_fitted() -> None:
    assert fit_steps(records(20), prompts_per_output=2.0) is None
    assert len(StepRecords.joined([records(20), records(30)])) == 50
