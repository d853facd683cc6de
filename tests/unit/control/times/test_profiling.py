"""Waves that cover what an engine can run, and fits that noise does not fool."""

from dataclasses import replace
from random import Random

import pytest

from pipemax.control.times.estimator import PhaseWork, ProfileRow
from pipemax.control.times.profiling import (
    TimedCopy,
    TimedStep,
    Wave,
    WaveLimits,
    affordable_wave_tokens,
    design_waves,
    fit_measured,
    fit_stages,
    predicted_and_measured,
    prediction_error,
    profile_rows,
    round_trip_s,
)
from pipemax.domain.plan import Phase

LIMITS = WaveLimits(
    num_batches=2, max_num_seqs=64, max_model_len=512, gpu_kv_tokens=1920, host_kv_tokens=16_000
)


def decode_step(size: int, kv_tokens: int, noise: float = 1.0) -> TimedStep:
    """A stage of 1 ms, 0.1 ms a request and 1 µs a token, and one twice as slow."""
    seconds = (1e-3 + 1e-4 * size + 1e-6 * kv_tokens) * noise
    work = PhaseWork(phase=Phase.DECODE, size=size, kv_tokens=kv_tokens)
    return TimedStep(work=work, stage_s=(seconds, 2 * seconds))


def prefill_step(size: int) -> TimedStep:
    seconds = 1e-3 + 1e-5 * size
    work = PhaseWork(phase=Phase.PREFILL, size=size, kv_tokens=size * size // 2)
    return TimedStep(work=work, stage_s=(seconds, 2 * seconds))


def test_waves_reach_the_corners_first_and_fit_the_gpu_but_for_one() -> None:
    waves = design_waves(LIMITS)
    assert waves[0].num_requests == 1, "a lone request tells the round trip"
    contexts = {wave.prompt_tokens for wave in waves[1:4]}
    assert contexts == {16, 126, 504}, "the first waves see short, middle and long contexts"
    overflowing = [wave for wave in waves if wave.kv_tokens > LIMITS.gpu_kv_tokens]
    assert len(overflowing) == 1, "for the copies"
    assert overflowing[0].kv_tokens <= LIMITS.host_kv_tokens
    assert overflowing[0] in waves[:6]
    assert all(wave.prompt_tokens + wave.output_tokens <= LIMITS.max_model_len for wave in waves)


def test_without_a_host_pool_to_speak_of_nothing_overflows() -> None:
    small = WaveLimits(
        num_batches=2, max_num_seqs=64, max_model_len=512, gpu_kv_tokens=1920, host_kv_tokens=1920
    )
    assert all(wave.kv_tokens <= small.gpu_kv_tokens for wave in design_waves(small))


def test_the_round_trip_is_what_tokens_take_beyond_the_stages() -> None:
    steps = [decode_step(4, 400), decode_step(4, 404), prefill_step(64)]
    stages_s = sum(steps[0].stage_s)
    gaps = [(stages_s + 0.004) / 2] * 5
    assert round_trip_s(gaps, steps, num_batches=2) == [pytest.approx(0.004, abs=2e-5)]
    assert round_trip_s(gaps, [prefill_step(64)], num_batches=2) == []
    assert round_trip_s([1e-6] * 3, steps, num_batches=1) == [0.0], "never negative"


def test_waves_are_sized_by_the_time_that_one_took() -> None:
    wave = Wave(num_requests=2, prompt_tokens=504)  # 1,024 tokens
    assert affordable_wave_tokens(wave, 0.5, time_limit_s=14.0) == 4096
    assert affordable_wave_tokens(wave, 60.0, time_limit_s=15.0) == 1024, "as many as that one had, at least"


def test_with_little_time_profiling_does_not_fill_the_gpu_pool() -> None:
    large = WaveLimits(
        num_batches=8,
        max_num_seqs=256,
        max_model_len=8192,
        gpu_kv_tokens=300_000,
        host_kv_tokens=3_000_000,
        most_wave_tokens=65_536,
    )
    waves = design_waves(large)
    assert max(wave.kv_tokens for wave in waves) <= 65_536
    assert {wave.prompt_tokens for wave in waves[1:4]} == {16, 2046, 8184}


def test_with_little_time_batches_as_large_as_those_of_a_full_pool_are_measured_all_the_same() -> None:
    one_stage = WaveLimits(
        num_batches=3,
        max_num_seqs=256,
        max_model_len=8192,
        gpu_kv_tokens=300_000,
        host_kv_tokens=3_000_000,
        most_wave_tokens=1_000,
    )
    waves = design_waves(one_stage)
    assert max(wave.num_requests for wave in waves) // 3 == 300_000 // (3 * 512)
    assert max(wave.kv_tokens for wave in waves if wave.prompt_tokens > 16) <= 3 * 8_192
    few_slots = replace(one_stage, max_num_seqs=32)
    assert max(wave.num_requests for wave in design_waves(few_slots)) // 3 == 32


def test_similar_steps_are_merged_into_their_median() -> None:
    steps = [decode_step(8, 800 + 8 * i, noise=30.0 if i == 3 else 1.0) for i in range(7)]
    (row,) = profile_rows(steps, Phase.DECODE, stage=0)
    assert row.size == 8
    assert row.seconds == pytest.approx(1e-3 + 8e-4 + 8.24e-4, rel=0.01), "the outlier has no say"


def test_stages_are_fitted_apart_and_copies_give_the_bandwidth() -> None:
    rng = Random(0)
    steps = [
        decode_step(size, size * context, noise=rng.uniform(0.97, 1.03))
        for size in (1, 4, 16, 64)
        for context in (16, 128, 500)
        for _ in range(9)
    ]
    steps += [prefill_step(size) for size in (16, 64, 256, 512)]
    copies = [TimedCopy(num_blocks=10, stage_s=(0.001, 0.002)), TimedCopy(num_blocks=1, stage_s=(1.0, 1.0))]
    stages = fit_stages(
        steps, copies, kv_bytes_per_token=[100, 200], block_tokens=32, default_h2d_bytes_per_s=1.0
    )
    assert stages[1].decode_time.seconds(32, 3200) == pytest.approx(2 * (1e-3 + 3.2e-3 + 3.2e-3), rel=0.05)
    assert stages[0].h2d_bytes_per_s == pytest.approx(10 * 3200 / 0.001)
    assert stages[1].h2d_bytes_per_s == pytest.approx(10 * 6400 / 0.002)
    error = prediction_error(predicted_and_measured(stages, steps, Phase.DECODE))
    assert error.num_steps == 2 * 108
    assert error.within_5_percent > 0.9


def test_without_copies_the_bandwidth_is_the_default() -> None:
    stages = fit_stages(
        [decode_step(1, 16), prefill_step(16)],
        [],
        kv_bytes_per_token=[100, 100],
        block_tokens=32,
        default_h2d_bytes_per_s=7.0,
    )
    assert stages[0].h2d_bytes_per_s == 7.0


def test_a_phase_without_steps_is_an_error_with_the_remedy() -> None:
    with pytest.raises(ValueError, match="give the calibration more time"):
        fit_stages(
            [decode_step(1, 16)], [], kv_bytes_per_token=[1, 1], block_tokens=1, default_h2d_bytes_per_s=1.0
        )


@pytest.mark.parametrize("seed", range(8))
def test_no_fit_says_that_a_larger_batch_is_faster(seed: int) -> None:
    rng = Random(seed)
    rows = [
        ProfileRow(size=size, kv_tokens=size * context, seconds=rng.uniform(1e-3, 9e-3))
        for size in (1, 2, 4, 8, 16, 32)
        for context in (16, 100, 400)
    ]
    model = fit_measured(rows)
    seconds = [model.batch_s(size) for size in range(1, 64)]
    assert seconds == sorted(seconds)
    assert seconds[0] > 0
    assert model.beta_s >= 0
