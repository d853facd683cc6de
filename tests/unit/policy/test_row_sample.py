"""``policy: auto``: the rows that are simulated, and what is chosen for a measured engine."""

from dataclasses import replace

import numpy as np
import pytest

from pipemax.config import RowLengths
from pipemax.control.controller_config import StageConfig
from pipemax.domain.specs import KvCapacity
from pipemax.domain.step_times import StepTimeModel
from pipemax.domain.tuned import WAVE_GROUPS
from pipemax.policy.compare import ChosenPolicy
from pipemax.policy.row_sample import choose_policy, draw_rows
from pipemax.sim.measured_engine import MeasuredEngine
from pipemax.sim.systems.continuous import STOCK_VLLM, ContinuousBatching
from pipemax.sim.systems.scenario import measured_scenario


def lengths(**values: object) -> RowLengths:
    defaults = {"prompt_tokens": [40, 60, 80, 120], "max_tokens": 100}
    return RowLengths.model_validate(defaults | values)


def engine(*, stages: int, gpu_blocks: int, alpha_s: float = 1e-5, h2d: float = 20e9) -> MeasuredEngine:
    """Steps that cost little more for more requests, as on a GPU that reads its weights for them."""
    stage = StageConfig(
        kv_bytes_per_token=10_000,
        h2d_bytes_per_s=h2d,
        decode_time=StepTimeModel.linear(alpha_s=alpha_s, beta_s=1e-9, delta_s=5e-3),
        prefill_time=StepTimeModel.linear(alpha_s=2e-5, beta_s=1e-10, delta_s=5e-3),
    )
    return MeasuredEngine(
        stages=(stage,) * stages,
        round_trip_s=1e-3,
        capacity=KvCapacity(block_tokens=16, gpu_blocks=gpu_blocks, host_blocks=8 * gpu_blocks),
        num_batches=max(2, stages),
        max_num_seqs=512,
        max_batched_tokens=512,
        max_model_len=512,
    )


def test_rows_are_drawn_from_the_sample_and_outputs_are_skewed_with_a_quarter_of_the_maximum_as_their_mean() -> (
    None
):
    rows = draw_rows(engine(stages=4, gpu_blocks=200), lengths())
    assert not rows.is_whole_table
    workload = rows.workload
    assert {*workload.prompt_tokens.tolist()} == {40, 60, 80, 120}
    assert workload.output_tokens.min() >= 1
    assert workload.output_tokens.max() <= 100
    assert workload.output_tokens.mean() == pytest.approx(25, rel=0.03)
    assert float(np.median(workload.output_tokens)) < 0.8 * workload.output_tokens.mean()


def test_expected_outputs_are_met_and_a_small_table_is_simulated_whole() -> None:
    rows = draw_rows(engine(stages=2, gpu_blocks=200), lengths(mean_output_tokens=100, rows=30))
    assert rows.is_whole_table
    workload = rows.workload
    assert len(workload) == 30
    assert {*workload.output_tokens.tolist()} == {100}


def test_prompts_beyond_the_model_are_cut_and_leave_room_for_a_token() -> None:
    small = engine(stages=2, gpu_blocks=200)
    workload = draw_rows(small, lengths(prompt_tokens=[4000], shared_prefix_tokens=4000)).workload
    assert (workload.prompt_tokens + workload.output_tokens).max() <= small.max_model_len
    assert workload.shared_prefix_tokens < workload.prompt_tokens.min()


def test_many_stages_and_scarce_memory_make_pipemax_the_choice() -> None:
    choice = choose_policy(engine(stages=8, gpu_blocks=160), lengths())
    assert choice.chosen is ChosenPolicy.PIPEMAX
    assert choice.speedup > 1.2
    assert f"{choice.speedup:.2f}×" in choice.reason
    assert choice.inputs["stages"] == 8
    assert choice.inputs["lengths"] == "4 sampled rows"


def test_waves_are_simulated_where_the_engine_has_them() -> None:
    """And no others: what they gain over two stages of the paper's case is in lab/results/few_stages.md."""
    plain = engine(stages=2, gpu_blocks=200)
    choices = [choose_policy(replace(plain, wave_groups=groups), lengths()) for groups in (None, WAVE_GROUPS)]
    without, waves = (choice.predicted_tokens_per_s for choice in choices)
    assert waves["pipemax"] > 1.02 * without["pipemax"]
    assert waves["vllm"] == without["vllm"]
    assert [choice.inputs.get("wave_groups") for choice in choices] == [None, WAVE_GROUPS]
    assert [" tokens and waves" in choice.reason for choice in choices] == [False, True]


def test_memory_for_all_rows_makes_stock_vllm_the_choice() -> None:
    choice = choose_policy(engine(stages=2, gpu_blocks=10_000), lengths(rows=100))
    assert choice.chosen is ChosenPolicy.VLLM
    assert "gains less than 2%" in choice.reason


@pytest.mark.parametrize("gpu_blocks", [2_000, 20_000])
def test_the_rows_simulated_fill_the_gpus_three_times(gpu_blocks: int) -> None:
    """The engine is that of the paper's case: thousands of requests fit the GPUs, ten times as many the host."""
    paper = replace(engine(stages=8, gpu_blocks=gpu_blocks), max_model_len=4096)
    workload = draw_rows(
        paper, lengths(prompt_tokens=[250, 350, 450], max_tokens=1000, mean_output_tokens=240)
    ).workload
    assert workload.total_tokens > 2.9 * paper.capacity.gpu_tokens


def test_more_places_than_rows_in_flight_are_not_simulated_for_memory_that_nobody_fills() -> None:
    roomy = engine(stages=2, gpu_blocks=1_000_000)
    workload = draw_rows(roomy, lengths()).workload
    assert len(workload) == 6 * 2 * 512


def test_stock_vllm_is_compared_at_its_best_size_of_a_step_and_gets_it() -> None:
    wide = replace(engine(stages=2, gpu_blocks=4_000), max_batched_tokens=4096)
    rows = lengths(prompt_tokens=[300, 400], max_tokens=60, mean_output_tokens=15.0, rows=600)
    own = choose_policy(wide, rows)
    assert own.chosen is ChosenPolicy.PIPEMAX
    best = choose_policy(wide, rows, chunk_is_free=True)
    assert best.chosen is ChosenPolicy.VLLM, "with smaller steps it is as fast"
    assert best.settings == {"max_num_batched_tokens": 2048, "max_num_seqs": 512}
    assert best.inputs["stock_chunk_tokens"] == 2048
    assert "stock vLLM with steps of up to 2,048 tokens" in best.reason


def test_rows_that_nobody_sampled_are_an_assumption_that_is_named() -> None:
    choice = choose_policy(engine(stages=2, gpu_blocks=200), None)
    assert choice.inputs["lengths"] == "assumed"
    assert "for rows nobody sampled: prompts of up to 256 tokens" in choice.reason


def test_a_measured_engine_takes_what_its_calibration_says() -> None:
    """One request at a time, by hand: its prompt, then each token, and a round trip after each step."""
    one = engine(stages=2, gpu_blocks=40)
    workload = draw_rows(one, lengths(prompt_tokens=[64], mean_output_tokens=100, rows=1)).workload
    result = ContinuousBatching(measured_scenario(one, workload), STOCK_VLLM).simulate()
    prefill_s = 2 * one.stages[0].prefill_time.seconds(64, 64 * 65 // 2) + one.round_trip_s
    decode_s = sum(
        2 * one.stages[0].decode_time.seconds(1, 64 + token) + one.round_trip_s for token in range(99)
    )
    assert result.seconds == pytest.approx(prefill_s + decode_s, rel=0.001)


def test_stock_vllm_runs_no_more_requests_than_it_may() -> None:
    limited = replace(engine(stages=2, gpu_blocks=1000), max_num_seqs=6)
    workload = draw_rows(limited, lengths(rows=60)).workload
    result = ContinuousBatching(measured_scenario(limited, workload), STOCK_VLLM).simulate()
    assert result.mean_decode_batch <= 6


@pytest.mark.long  # simulation; test_policy_start has it of an engine
def test_a_model_whose_windows_are_freed_by_stock_vllm_takes_stock_vllm() -> None:
    """Rows of 400 tokens and a window of 32 in five of six layers: stock vLLM holds four times as many of them."""
    whole = engine(stages=4, gpu_blocks=400)
    rows = lengths(prompt_tokens=[300], max_tokens=100, mean_output_tokens=100)
    assert choose_policy(whole, rows).chosen is ChosenPolicy.PIPEMAX
    windowed = whole.capacity.with_freed_windows(
        [(0, 6), (6, 12), (12, 18), (18, 24)], (5, 11, 17, 23), window_tokens=32
    )
    assert windowed.gpu_rows(400) > 3.5 * whole.capacity.gpu_rows(400)
    choice = choose_policy(replace(whole, windowed_capacity=windowed), rows)
    assert choice.chosen is ChosenPolicy.VLLM
    assert choice.predicted_tokens_per_s["vllm"] > choice.predicted_tokens_per_s["pipemax"]
