"""Mixed steps in a calibration: what prompt tokens add to decodes is fitted to measured steps."""

import random
from pathlib import Path

import pytest

from pipemax.control.controller_config import StageConfig
from pipemax.control.times.calibration import Calibration, load_calibration, save_calibration
from pipemax.control.times.estimator import MixedWork
from pipemax.control.times.profiling import (
    TimedMixedStep,
    mixed_predicted_and_measured,
    prediction_error,
    with_mixed_scales,
)
from pipemax.domain.step_times import StepTimeModel, mixed_step_s

STAGE = StageConfig(
    kv_bytes_per_token=1000,
    h2d_bytes_per_s=1e9,
    decode_time=StepTimeModel.linear(alpha_s=2e-5, beta_s=1e-9, delta_s=5e-3),
    prefill_time=StepTimeModel.linear(alpha_s=3e-5, beta_s=1e-10, delta_s=5e-3),
)


def timed(scale: float, count: int = 40, noise: float = 0.0) -> list[TimedMixedStep]:
    """Steps in which prompt tokens cost ``scale`` times what a prefill step says, on the second of two stages."""
    rng = random.Random(0)
    steps = []
    for _ in range(count):
        work = MixedWork(
            num_decodes=rng.randint(1, 60),
            kv_tokens=rng.randint(100, 10_000),
            prompt_tokens=rng.randint(50, 500),
            token_pairs=rng.randint(1_000, 100_000),
        )
        seconds = [
            mixed_step_s(
                STAGE.decode_time,
                STAGE.prefill_time,
                num_decodes=work.num_decodes,
                kv_tokens=work.kv_tokens,
                prompt_tokens=work.prompt_tokens,
                token_pairs=work.token_pairs,
                mixed_scale=each,
            )
            for each in (1.0, scale)
        ]
        steps.append(
            TimedMixedStep(work=work, stage_s=tuple(one * (1 + rng.gauss(0, noise)) for one in seconds))
        )
    return steps


@pytest.mark.parametrize("scale", [0.6, 1.0, 1.7])
def test_the_factor_of_mixed_steps_is_found_for_each_stage(scale: float) -> None:
    stages = with_mixed_scales([STAGE, STAGE], timed(scale))
    assert stages[0].mixed_scale == pytest.approx(1.0)
    assert stages[1].mixed_scale == pytest.approx(scale)
    assert prediction_error(mixed_predicted_and_measured(stages, timed(scale))).worst < 1e-9


def test_noise_moves_the_factor_little_and_a_wrong_one_predicts_worse() -> None:
    steps = timed(1.5, noise=0.05)
    fitted = with_mixed_scales([STAGE, STAGE], steps)
    assert fitted[1].mixed_scale == pytest.approx(1.5, rel=0.1)
    before = prediction_error(mixed_predicted_and_measured([STAGE, STAGE], steps)).mean
    assert prediction_error(mixed_predicted_and_measured(fitted, steps)).mean < before / 1.5


def test_few_steps_leave_the_factor_as_it_is() -> None:
    assert with_mixed_scales([STAGE, STAGE], timed(2.0, count=5)) == (STAGE, STAGE)


def test_a_calibration_keeps_the_factor_and_an_older_one_has_none(tmp_path: Path) -> None:
    stages = with_mixed_scales([STAGE, STAGE], timed(1.7))
    path = tmp_path / "calibration.yaml"
    save_calibration(path, Calibration(device="d", model="m", measured="now", stages=stages))
    assert load_calibration(path).stages == stages
    older = "".join(
        line for line in path.read_text(encoding="utf-8").splitlines(True) if "mixed_scale" not in line
    )
    path.write_text(older, encoding="utf-8")
    assert [stage.mixed_scale for stage in load_calibration(path).stages] == [1.0, 1.0]
