"""Mixed steps in a calibration: what prompt tokens add to decodes is fitted to measured steps."""

import random
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import pytest
import yaml

from pipemax.control.controller_config import StageConfig
from pipemax.control.times.calibration import Calibration, load_calibration, save_calibration
from pipemax.control.times.estimator import MixedWork
from pipemax.control.times.mixed_profiling import (
    MixedRows,
    mixed_rows,
    with_mixed_scales,
)
from pipemax.control.times.profiling import TimedStep, WaveLimits, predicted_and_measured, prediction_error
from pipemax.domain.plan import Phase
from pipemax.domain.step_times import DECODE_SHARES, StepTimeModel, mixed_scale, mixed_step_s

STAGE = StageConfig(
    kv_bytes_per_token=1000,
    h2d_bytes_per_s=1e9,
    decode_time=StepTimeModel.linear(alpha_s=2e-5, beta_s=1e-9, delta_s=5e-3),
    prefill_time=StepTimeModel.linear(alpha_s=3e-5, beta_s=1e-10, delta_s=5e-3),
)


def timed(
    *scales: float, count: int = 40, noise: float = 0.0, shares: Sequence[float] = (0.1,)
) -> list[TimedStep]:
    """Steps in which prompt tokens cost ``scales`` times what a prefill step says, on the second of two stages."""
    rng = random.Random(0)
    steps = []
    for number in range(count):
        num_tokens, share = rng.randint(100, 2000), shares[number % len(shares)]
        work = MixedWork(
            num_decodes=round(share * num_tokens),
            kv_tokens=rng.randint(100, 10_000),
            prompt_tokens=num_tokens - round(share * num_tokens),
            token_pairs=rng.randint(1_000, 100_000),
        )
        seconds = [
            mixed_step_s(STAGE.decode_time, STAGE.prefill_time, **asdict(work), mixed_scales=each)
            for each in ((1.0,), scales)
        ]
        steps.append(TimedStep(work=work, stage_s=tuple(one * (1 + rng.gauss(0, noise)) for one in seconds)))
    return steps


@pytest.mark.parametrize("scale", [0.6, 1.0, 1.7])
def test_the_factor_of_mixed_steps_is_found_for_each_stage(scale: float) -> None:
    stages = with_mixed_scales([STAGE, STAGE], timed(scale))
    assert stages[0].mixed_scales == (pytest.approx(1.0),)
    assert stages[1].mixed_scales == (pytest.approx(scale),)
    assert prediction_error(predicted_and_measured(stages, timed(scale), Phase.MIXED)).worst < 1e-9


def test_noise_moves_the_factor_little_and_a_wrong_one_predicts_worse() -> None:
    steps = timed(1.5, noise=0.05)
    fitted = with_mixed_scales([STAGE, STAGE], steps)
    assert fitted[1].mixed_scales == (pytest.approx(1.5, rel=0.1),)
    before = prediction_error(predicted_and_measured([STAGE, STAGE], steps, Phase.MIXED)).mean
    assert prediction_error(predicted_and_measured(fitted, steps, Phase.MIXED)).mean < before / 1.5


def test_scales_that_differ_by_the_share_of_decodes_are_kept_apart() -> None:
    scales = (0.8, 0.9, 1.1, 1.4, 1.9)
    steps = timed(*scales, count=150, shares=DECODE_SHARES)
    fitted = with_mixed_scales([STAGE, STAGE], steps)
    assert fitted[0].mixed_scales == (pytest.approx(1.0),), "alike, so one is kept"
    assert fitted[1].mixed_scales == pytest.approx(scales, rel=0.02)
    assert prediction_error(predicted_and_measured(fitted, steps, Phase.MIXED)).within_5_percent > 0.95


def test_a_share_that_was_not_measured_has_the_scale_of_its_neighbour() -> None:
    steps = timed(0.8, 0.9, 1.1, 1.4, 1.9, count=60, shares=(0.1, 0.5))
    (_, fitted) = with_mixed_scales([STAGE, STAGE], steps)
    assert fitted.mixed_scales == pytest.approx((0.8, 0.8, 1.1, 1.1, 1.1), rel=0.02)


def test_scales_are_linear_between_shares_and_1_without_decodes() -> None:
    scales = (1.0, 2.0, 2.0, 3.0, 5.0)
    given = [mixed_scale(scales, decodes, 100 - decodes) for decodes in (0, 1, 10, 20, 30, 50, 80, 90, 99)]
    assert given == pytest.approx([1.0, 1.0, 1.0, 1.5, 2.0, 2.0, 4.0, 5.0, 5.0])
    assert mixed_scale((1.7,), 20, 80) == 1.7


@pytest.mark.parametrize("share", DECODE_SHARES)
@pytest.mark.parametrize(("max_num_seqs", "most_step_tokens"), [(256, 2048), (8, 512), (64, 128)])
def test_rows_are_chosen_so_that_steps_settle_at_the_share_of_decodes(
    share: float, max_num_seqs: int, most_step_tokens: int
) -> None:
    limits = WaveLimits(
        num_batches=1,
        max_num_seqs=max_num_seqs,
        max_model_len=2048,
        gpu_kv_tokens=200_000,
        host_kv_tokens=200_000,
    )
    settled = list[tuple[int, int]]()
    for seed in range(10):  # few rows settle anywhere near it
        mix = mixed_rows(limits, share, most_step_tokens=most_step_tokens, rng=random.Random(seed))
        assert mix.step_tokens <= most_step_tokens
        steps = steps_of(mix)
        settled += steps[len(steps) // 2 :]
    mean = sum(decodes / (decodes + prompts) for decodes, prompts in settled) / len(settled)
    assert mean == pytest.approx(share, abs=0.1)


def steps_of(mix: MixedRows) -> list[tuple[int, int]]:
    """Run one batch: every step decodes all its rows, and prompt tokens fill it up while there are any."""
    waiting, decoding, steps = [list(row) for row in mix.lengths], list[int](), list[tuple[int, int]]()
    while waiting:
        decoding = [left - 1 for left in decoding if left > 1]
        decodes = len(decoding)
        room = prompts = max(0, mix.step_tokens - decodes)
        while waiting and room:
            taken = min(room, waiting[0][0])
            room -= taken
            waiting[0][0] -= taken
            if not waiting[0][0]:
                decoding.append(waiting.pop(0)[1])
        if decodes:
            steps.append((decodes, prompts - room))
    return steps


def test_few_steps_leave_the_factor_as_it_is() -> None:
    assert with_mixed_scales([STAGE, STAGE], timed(2.0, count=5)) == (STAGE, STAGE)


def test_a_calibration_keeps_the_factor_and_an_older_one_has_none(tmp_path: Path) -> None:
    stages = with_mixed_scales([STAGE, STAGE], timed(1.7))
    path = tmp_path / "calibration.yaml"
    save_calibration(path, Calibration(device="d", model="m", measured="now", stages=stages))
    assert load_calibration(path).stages == stages
    values = yaml.safe_load(path.read_text(encoding="utf-8"))
    for stage in values["stages"]:
        del stage["mixed_scales"]
    values["stages"][1]["mixed_scale"] = 1.3
    path.write_text(yaml.safe_dump(values), encoding="utf-8")
    assert [stage.mixed_scales for stage in load_calibration(path).stages] == [(1.0,), (1.3,)]
