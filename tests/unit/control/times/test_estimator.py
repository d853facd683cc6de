"""T̂ = α·b + β·L + δ: fitted, refined, its error known."""

from functools import partial
from random import Random

import pytest

from pipemax.control.times.estimator import (
    PAPER_WORST_ERROR,
    BandwidthEstimator,
    MixedEstimator,
    MixedWork,
    OnlineEstimator,
    ProfileRow,
    fit_step_time,
)
from pipemax.domain.step_times import Segment, StepTimeModel, mixed_step_s

LINE = StepTimeModel.linear(alpha_s=1e-4, beta_s=2e-8, delta_s=0.01)
SIZES = (1, 8, 16, 32, 64, 128, 256)
TOKENS_EACH = (64, 512, 2048)


def staircase_s(size: int, kv_tokens: int) -> float:
    """A matrix product in tiles of 64 rows, and attention."""
    return 0.01 + 0.004 * (-(-size // 64)) + 2e-8 * kv_tokens


def rows_of(seconds, sizes=SIZES) -> list[ProfileRow]:
    return [
        ProfileRow(size=size, kv_tokens=size * each, seconds=seconds(size, size * each))
        for size in sizes
        for each in TOKENS_EACH
    ]


def worst_error(model: StepTimeModel, rows: list[ProfileRow]) -> float:
    return max(abs(model.seconds(row.size, row.kv_tokens) / row.seconds - 1) for row in rows)


def test_a_linear_step_time_is_recovered_by_the_fit() -> None:
    fitted = fit_step_time(rows_of(LINE.seconds))
    assert len(fitted.segments) == 1
    assert fitted.segments[0].alpha_s == pytest.approx(1e-4)
    assert fitted.segments[0].delta_s == pytest.approx(0.01)
    assert fitted.beta_s == pytest.approx(2e-8)


def test_noise_alone_adds_no_segments() -> None:
    rng = Random(0)
    rows = [
        ProfileRow(size=r.size, kv_tokens=r.kv_tokens, seconds=r.seconds * rng.uniform(0.97, 1.03))
        for r in rows_of(LINE.seconds)
        for _ in range(5)
    ]
    assert len(fit_step_time(rows).segments) == 1


def test_a_staircase_gets_segments_until_it_is_met_within_the_papers_error() -> None:
    rows = rows_of(staircase_s, sizes=(1, 32, 64, 65, 100, 128, 129, 192, 193, 256))
    one_line = fit_step_time(rows, max_segments=1)
    fitted = fit_step_time(rows)
    assert worst_error(one_line, rows) > PAPER_WORST_ERROR
    assert worst_error(fitted, rows) < PAPER_WORST_ERROR
    assert len(fitted.segments) > 1


def test_attention_never_speeds_a_step_up() -> None:
    """Noise over a small range of L would make β negative."""
    rows = [ProfileRow(size=8, kv_tokens=tokens, seconds=0.02 - tokens * 1e-7) for tokens in (1, 100, 200)]
    assert fit_step_time(rows).beta_s == 0.0


@pytest.mark.parametrize(
    "rows",
    [
        [],
        [ProfileRow(size=0, kv_tokens=1, seconds=1.0)],
        [ProfileRow(size=1, kv_tokens=1, seconds=0.0)],
        [ProfileRow(size=1, kv_tokens=-1, seconds=1.0)],
    ],
)
def test_rows_without_a_step_in_them_are_refused(rows: list[ProfileRow]) -> None:
    with pytest.raises(ValueError, match="a fit needs rows"):
        fit_step_time(rows)


def test_segments_hold_from_their_smallest_size_on() -> None:
    model = StepTimeModel(
        segments=(
            Segment(min_size=1, alpha_s=0.0, delta_s=1.0),
            Segment(min_size=10, alpha_s=0.1, delta_s=2.0),
        ),
        beta_s=0.5,
    )
    assert model.seconds(9, 0) == 1.0
    assert model.seconds(10, 0) == 3.0
    assert model.seconds(10, 2) == 4.0
    assert model.seconds(0, 5) == 0.0


def test_segments_must_ascend_from_one() -> None:
    with pytest.raises(ValueError, match="ascend from 1"):
        StepTimeModel(segments=(Segment(min_size=2, alpha_s=0.0, delta_s=1.0),), beta_s=0.0)
    with pytest.raises(ValueError, match="beta_s"):
        StepTimeModel.linear(alpha_s=0.0, beta_s=-1.0, delta_s=1.0)


@pytest.mark.parametrize(("batch_factor", "kv_factor"), [(1.3, 1.0), (1.0, 1.6), (0.8, 1.2)])
def test_online_refinement_finds_terms_that_the_profile_missed(batch_factor: float, kv_factor: float) -> None:
    estimator, rng = OnlineEstimator(LINE), Random(1)
    for _ in range(3000):
        size, tokens = rng.randint(1, 256), rng.randint(100, 500_000)
        truth = batch_factor * LINE.batch_s(size) + kv_factor * LINE.beta_s * tokens
        estimator.observe(size, tokens, truth)
    assert estimator.batch_scale == pytest.approx(batch_factor, rel=0.05)
    assert estimator.kv_scale == pytest.approx(kv_factor, rel=0.05)
    assert estimator.error().worst < 0.05


def test_one_outlier_barely_moves_the_estimate() -> None:
    estimator = OnlineEstimator(LINE)
    before = estimator.seconds(64, 64_000)
    estimator.observe(64, 64_000, 100 * before)
    assert estimator.seconds(64, 64_000) < 1.06 * before


def test_steps_that_waited_for_something_else_do_not_bias_the_estimate() -> None:
    """As on an H100: 9 steps in 130 had to wait for a copy, and predictions between them were 4 % too high."""
    estimator, rng = OnlineEstimator(LINE), Random(2)
    for number in range(2000):
        usual_s = LINE.seconds(64, 64_000) * (1 + rng.gauss(0, 0.015))
        estimator.observe(64, 64_000, 1.9 * usual_s if number % 14 == 5 else usual_s)
    assert estimator.seconds(64, 64_000) == pytest.approx(LINE.seconds(64, 64_000), rel=0.01)


def test_steps_that_all_became_slower_are_followed_within_a_hundred() -> None:
    estimator = OnlineEstimator(LINE)
    for _ in range(500):
        estimator.observe(64, 64_000, LINE.seconds(64, 64_000))
    for _ in range(100):
        estimator.observe(64, 64_000, 1.4 * LINE.seconds(64, 64_000))
    assert estimator.seconds(64, 64_000) == pytest.approx(1.4 * LINE.seconds(64, 64_000), rel=0.05)


def test_the_error_is_what_predictions_missed_lately() -> None:
    estimator = OnlineEstimator(LINE)
    assert estimator.error().num_steps == 0
    estimator.observe(10, 1000, 1.10 * LINE.seconds(10, 1000))
    error = estimator.error()
    assert error.worst == pytest.approx(0.10)
    assert error.within_5_percent == 0.0
    for _ in range(OnlineEstimator.WINDOW):
        estimator.observe(10, 1000, estimator.seconds(10, 1000))
    assert estimator.error().worst == pytest.approx(0.0)
    assert estimator.error().within_5_percent == 1.0


STEEP = StepTimeModel.linear(alpha_s=5e-5, beta_s=2e-8, delta_s=0.004)


def mixed_work(rng: Random) -> MixedWork:
    decodes, prompt_tokens = rng.randint(1, 256), rng.randint(1, 512)
    return MixedWork(
        num_decodes=decodes,
        kv_tokens=decodes * rng.randint(100, 2000),
        prompt_tokens=prompt_tokens,
        token_pairs=prompt_tokens * rng.randint(100, 4000),
    )


def test_a_mixed_step_of_one_kind_takes_that_kind_s_time() -> None:
    decode, prefill = OnlineEstimator(LINE), OnlineEstimator(STEEP)
    mixed = MixedEstimator(decode, prefill)
    only_decodes = MixedWork(num_decodes=8, kv_tokens=9000, prompt_tokens=0, token_pairs=0)
    assert mixed.seconds(only_decodes) == decode.seconds(8, 9000)
    only_prompts = MixedWork(num_decodes=0, kv_tokens=0, prompt_tokens=64, token_pairs=70_000)
    assert mixed.seconds(only_prompts) == pytest.approx(prefill.seconds(64, 70_000))


def test_prompt_tokens_cost_what_they_add_to_the_products_of_the_decodes() -> None:
    """On a tile's last row a prompt token takes the step to the next tile; before it, prompt tokens are free."""
    tiles = StepTimeModel(
        segments=(
            Segment(min_size=1, alpha_s=0.0, delta_s=0.010),
            Segment(min_size=129, alpha_s=0.0, delta_s=0.018),
        ),
        beta_s=0.0,
    )
    step_s = partial(mixed_step_s, tiles, tiles, kv_tokens=0, token_pairs=0)
    assert step_s(num_decodes=100, prompt_tokens=28) == 0.010
    assert step_s(num_decodes=100, prompt_tokens=29) == pytest.approx(0.018)


def test_mixed_steps_refine_both_kinds() -> None:
    decode, prefill, rng = OnlineEstimator(LINE), OnlineEstimator(STEEP), Random(1)
    mixed = MixedEstimator(decode, prefill)
    factors = (1.2, 0.8, 1.5, 0.7)
    for _ in range(20_000):
        work = mixed_work(rng)
        truth = (
            factors[0] * LINE.batch_s(work.num_decodes)
            + factors[1] * LINE.beta_s * work.kv_tokens
            + factors[2] * STEEP.added_batch_s(work.num_decodes, work.prompt_tokens)
            + factors[3] * STEEP.beta_s * work.token_pairs
        )
        mixed.observe(work, truth)
    scales = (decode.batch_scale, decode.kv_scale, prefill.batch_scale, prefill.kv_scale)
    assert scales == pytest.approx(factors, rel=0.05)
    assert decode.error().worst < 0.05


def test_bandwidth_follows_what_is_measured() -> None:
    rate = BandwidthEstimator(50e9)
    for _ in range(200):
        rate.observe(20_000_000, 1e-3)
    assert rate.bytes_per_s == pytest.approx(20e9, rel=0.01)
    rate.observe(1, 0.0)
    assert rate.bytes_per_s == pytest.approx(20e9, rel=0.01)
