"""What the runs on one GPU conclude from tokens, samples and copy times."""

from pathlib import Path

import pytest

from lab.gpu import parity, stage_of_eight, stage_of_two, tuning
from lab.gpu.rates import Sample, WindowRates, decode_only, steady_pipemax, steady_stock, window_rates
from lab.gpu.tokens import compare, verdict
from pipemax.config import EngineConfig
from pipemax.domain.step_records import StepLimits
from pipemax.serve.flow.live_tuning import Inputs

ROUNDS = {
    "stock": {"r0": [1, 2, 3], "r1": [4, 5, 6]},
    "few": {"r0": [1, 2, 3], "r1": [4, 5, 6]},
    "pipemax": {"r0": [1, 2, 3], "r1": [4, 5, 6]},
    "wrong": {"r0": [1, 2, 3], "r1": [4, 9, 6]},
    "cut": {"r0": [1, 2, 3]},
}


def test_equal_tokens_pass_and_a_planted_fault_must_be_seen() -> None:
    compared = [
        compare("few", "stock", ROUNDS, kind="control"),
        compare("pipemax", "stock", ROUNDS, kind="PipeMax"),
        compare("wrong", "stock", ROUNDS, kind="planted fault"),
    ]
    assert [each.equal_rows for each in compared] == [2, 2, 1]
    assert compared[2].first_difference == 1
    assert verdict(compared) == "PARITY PASSED: 3 comparisons"


def test_a_fault_that_nothing_sees_fails() -> None:
    assert verdict([compare("pipemax", "stock", ROUNDS, kind="planted fault")]).startswith(
        "PARITY FAILED: pipemax"
    )


def test_other_tokens_missing_rows_and_missing_rounds_fail() -> None:
    for name in ("wrong", "cut", "nothing"):
        assert compare(name, "stock", ROUNDS, kind="PipeMax").passed is False
        assert compare("stock", name, ROUNDS, kind="PipeMax").passed is False
    assert verdict([]).startswith("PARITY FAILED")


def test_if_the_control_differs_nothing_is_said_of_pipemax() -> None:
    compared = [
        compare("wrong", "stock", ROUNDS, kind="control"),
        compare("wrong", "stock", ROUNDS, kind="PipeMax"),
    ]
    assert "nothing is known of PipeMax" in verdict(compared)


def test_a_comparison_across_kernels_is_no_criterion() -> None:
    compared = [
        compare("pipemax", "stock", ROUNDS, kind="PipeMax"),
        compare("wrong", "stock", ROUNDS, kind="across"),
    ]
    assert verdict(compared) == "PARITY PASSED: 1 comparisons"


def test_each_comparison_is_of_rounds_that_some_engine_runs_by_then(tmp_path: Path) -> None:
    rounds: set[str] = set()
    for wave in parity.waves(tmp_path, tmp_path):
        rounds |= {f"{name}.{each.name}" for name, plan in wave.drives.items() for each in plan.rounds}
        for mine, against, _ in wave.comparisons:
            assert {mine, against} <= rounds
        assert set(wave.environments) <= set(wave.drives)


def test_the_engine_configs_are_valid(tmp_path: Path) -> None:
    lengths = [(100, 50)] * 10
    drives = [plan for wave in parity.waves(tmp_path, tmp_path) for plan in wave.drives.values()]
    drives += [
        make(tmp_path, lengths, tmp_path)
        for make in (stage_of_eight.stock_drive, stage_of_eight.pipemax_drive)
    ]
    drives += [
        stage_of_two.stock_drive(tmp_path, lengths, tmp_path),
        stage_of_two.pipemax_drive(tmp_path, lengths, tmp_path, "waves", waves="on"),
    ]
    for plan in drives:
        EngineConfig.parse(dict(plan.config))
    assert tuning.config(tmp_path, lengths).row_lengths is not None


def test_the_grid_of_limits_has_the_default_between_the_others_and_at_both_ends() -> None:
    default = StepLimits(step_tokens=16384, running_rows=1024)
    settings = tuning.grid(default, StepLimits(step_tokens=16384, running_rows=2280))
    assert (settings[0], settings[-1]) == (default, default)
    assert len(settings) == 7
    assert settings.count(default) == 3
    assert tuning.grid(default, default)[-1] == default


def test_the_rows_without_end_answer_whatever_a_tuning_asks_of_a_job_s_streams() -> None:
    asked = {name for name in vars(Inputs) if not name.startswith("_")}
    assert asked >= {"jobs", "share_left"}
    assert not [name for name in asked if not hasattr(tuning.EndlessRows, name)]


# -- rates -----------------------------------------------------------------------------------------------------------


def sample(at_s: float, **metrics: float) -> Sample:
    waiting = int(metrics.pop("waiting", 0))
    cpu_s = metrics.pop("cpu_s", 0.0)
    return Sample(at_s=at_s, waiting_requests=waiting, metrics=metrics, core_cpu_s=cpu_s)


def test_rates_are_of_the_window_s_seconds_and_steps() -> None:
    samples = [
        sample(0.0),
        sample(1.0, output_tokens=100, output_steps=10, cpu_s=0.2),
        sample(3.0, output_tokens=500, output_steps=30, cpu_s=0.6),
    ]
    rates = window_rates("all", steady_stock(samples, settle_s=1.0, needs_waiting=False), gpu_blocks=100)
    assert rates is not None
    assert rates.seconds == 2.0
    assert rates.output_tokens_per_s == 200.0
    assert rates.mean_batch == 20.0
    assert rates.step_ms == 100.0
    assert rates.core_cpu_ms_per_step == pytest.approx(20.0)
    assert rates.stall_share is None


def test_stock_with_a_queue_is_steady_only_while_rows_wait() -> None:
    samples = [sample(0, waiting=5), sample(1, waiting=5), sample(2, waiting=0), sample(3, waiting=0)]
    assert [each.end.at_s for each in steady_stock(samples, settle_s=0.0, needs_waiting=True)] == [1]


def test_pipemax_is_steady_after_settling_and_near_the_peak_of_live_kv() -> None:
    live = [0, 100, 150, 195, 200, 185, 50]
    samples = [sample(at_s, live_blocks=blocks) for at_s, blocks in enumerate(live)]
    assert [each.end.at_s for each in steady_pipemax(samples, settle_s=0.0)] == [3, 4, 5]
    assert [each.end.at_s for each in steady_pipemax(samples, settle_s=3.0)] == [4, 5]
    assert steady_pipemax([sample(0), sample(1)], settle_s=0.0) == []


def test_decode_only_leaves_out_prompts_and_what_fits_the_gpu() -> None:
    samples = [
        sample(0, decode_steps=0, prefill_steps=0),
        sample(1, decode_steps=10, prefill_steps=3, live_blocks=200),
        sample(2, decode_steps=20, prefill_steps=3, live_blocks=200),
        sample(3, decode_steps=30, prefill_steps=3, live_blocks=110),
    ]
    assert [each.end.at_s for each in decode_only(samples, gpu_blocks=100)] == [2]


def test_samples_too_close_together_are_not_compared() -> None:
    assert steady_stock([sample(0), sample(0.1)], settle_s=0.0, needs_waiting=False) == []
    assert window_rates("all", [], gpu_blocks=100) is None


def rates(**changes: float) -> WindowRates:
    good = {
        "seconds": 20.0,
        "output_tokens_per_s": 9000.0,
        "mean_batch": 90.0,
        "step_ms": 10.0,
        "core_cpu_ms_per_step": 8.0,
        "preemptions": 0.0,
        "live_pools": 1.7,
        "live_pools_per_s": 0.002,
        "stall_share": 0.005,
        "h2d_gb_per_s": 50.0,
        "evictions_per_step": 1.0,
        "share_within_5_percent": 0.9,
    }
    return WindowRates(window="steady", **good | changes)


@pytest.mark.parametrize(
    ("changes", "failed"),
    [
        ({}, []),
        ({"live_pools_per_s": 0.043}, [0]),
        ({"output_tokens_per_s": 6000.0}, [1]),
        ({"stall_share": 0.01}, [2]),
        ({"share_within_5_percent": 0.79}, [3]),
        ({"core_cpu_ms_per_step": 10.0}, [4]),
    ],
)
def test_a_stage_of_eight_is_judged_by_five_criteria(changes: dict[str, float], failed: list[int]) -> None:
    criteria = stage_of_eight.judge(rates(output_tokens_per_s=6000.0), rates(**changes))
    assert [number for number, each in enumerate(criteria) if not each.passed] == failed
    assert len(criteria) == 5


@pytest.mark.parametrize(
    ("changes", "failed"),
    [
        ({}, []),
        ({"live_pools_per_s": 0.02}, [0]),
        ({"output_tokens_per_s": 7000.0}, [1]),
        ({"output_tokens_per_s": 5000.0}, [1, 2]),
        ({"stall_share": 0.02}, [3]),
    ],
)
def test_a_stage_of_two_with_waves_is_judged_by_four_criteria(
    changes: dict[str, float], failed: list[int]
) -> None:
    stock, without = rates(output_tokens_per_s=6000.0), rates(output_tokens_per_s=7000.0)
    criteria = stage_of_two.judge(stock, without, rates(**changes))
    assert [number for number, each in enumerate(criteria) if not each.passed] == failed
    assert [each.passed for each in stage_of_two.judge(stock, None, rates())] == [False]


def test_a_missing_window_fails_the_stage() -> None:
    assert [each.passed for each in stage_of_eight.judge(rates(), None)] == [False]
    assert [each.passed for each in stage_of_eight.judge(None, rates())] == [False]


def test_a_batch_of_stock_has_an_eighth_of_the_pool() -> None:
    rows = stage_of_eight.stock_rows([(400, 200)] * 100)
    assert rows.in_the_long_run == int(17_753 * 16 / 8 / (400 + 100 + 8))
    assert rows.at_first == int(17_753 * 16 / 8 / (400 + 24))


def test_lengths_leave_room_for_the_model_s_maximum() -> None:
    for prompt, output in ((5000, 5000), (10, 5000), (1900, 100), (1, 1)):
        cut_prompt, cut_output = stage_of_eight.cut_lengths(prompt, output)
        assert 1 <= cut_prompt <= prompt
        assert 1 <= cut_output <= output
        assert cut_prompt + cut_output < stage_of_eight.MOST_TOKENS
