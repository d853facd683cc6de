"""Rows in grains of several tokens: the same KV, step times and rates, in a fraction of the steps."""

from dataclasses import replace

import numpy as np
import pytest

from pipemax.domain.specs import Parallelism, kv_capacity
from pipemax.policy.layout_runs import LayoutRun, engine_scenario, run_pipemax, run_stock
from pipemax.policy.layouts import Layout
from pipemax.sim.machine import BLOCK_TOKENS
from pipemax.sim.measured_engine import MeasuredTimes
from pipemax.sim.stage_times import StageTimes, StepWork
from pipemax.sim.workloads import grain_of, in_grains
from tests.unit.policy.test_row_sample import engine
from tests.unit.sim.machines import small_model, small_node, small_workload
from tests.unit.sim.systems.test_pipemax import uniform_workload

LAYOUT = Layout(replicas=1, tensor_parallel=1, pipeline_parallel=2)


def test_rows_have_a_token_for_each_grain_and_at_least_one() -> None:
    rows = small_workload(200)
    coarse = in_grains(rows, 4)
    assert np.abs(coarse.prompt_tokens - rows.prompt_tokens / 4).max() <= 0.75
    assert in_grains(rows, 16).prompt_tokens.min() == 1
    assert coarse.output_tokens.sum() == pytest.approx(rows.output_tokens.sum() / 4, rel=0.02)
    templated = replace(rows, shared_prefix_tokens=int(rows.prompt_tokens.min()) - 1)
    assert in_grains(templated, 4).shared_prefix_tokens < in_grains(templated, 4).prompt_tokens.min()


def test_a_grain_leaves_enough_outputs_and_divides_a_block() -> None:
    assert grain_of(uniform_workload(50, 300, 60), BLOCK_TOKENS, enough_outputs=50) == 1
    assert grain_of(uniform_workload(50, 300, 230), BLOCK_TOKENS, enough_outputs=50) == 4
    assert grain_of(uniform_workload(50, 300, 6000), BLOCK_TOKENS, enough_outputs=50) == 16
    assert grain_of(uniform_workload(50, 300, 6000), 12, enough_outputs=50) == 4


def test_a_block_has_the_same_bytes_and_a_context_takes_as_long_to_read() -> None:
    node, model, layout = small_node(num_gpus=2), small_model(), Parallelism(pipeline=2, tensor=1)
    capacities = [
        kv_capacity(node, model.in_grains(grain), layout, block_tokens=BLOCK_TOKENS // grain)
        for grain in (1, 4)
    ]
    assert capacities[0].gpu_blocks == capacities[1].gpu_blocks
    assert capacities[0].host_blocks == capacities[1].host_blocks
    fine, coarse = (
        StageTimes(node, model.in_grains(grain), layout).stage_s(
            StepWork(decode_requests=8, decode_context_tokens=8000 // grain)
        )
        for grain in (1, 4)
    )
    assert coarse == pytest.approx(fine)
    measured = engine(stages=2, gpu_blocks=200)
    work = [StepWork(decode_requests=8, decode_context_tokens=8000 // grain) for grain in (1, 4)]
    assert MeasuredTimes(measured.in_grains(4)).stage_s(work[1]) == pytest.approx(
        MeasuredTimes(measured).stage_s(work[0])
    )
    assert measured.in_grains(4).capacity.gpu_tokens == measured.capacity.gpu_tokens // 4


def test_a_prompts_token_attends_to_as_much_context() -> None:
    node, layout = small_node(num_gpus=2), Parallelism(pipeline=2, tensor=1)
    fine, coarse = (
        StageTimes(node, small_model().in_grains(grain), layout).stage_s(
            StepWork(prefill_tokens=400, prefill_pairs=400 * 48_000 / grain)
        )
        for grain in (1, 4)
    )
    assert coarse == pytest.approx(fine)


def test_as_many_bytes_a_second_go_to_the_host() -> None:
    """Steps that are bound by their stores take as long in grains."""
    node = small_node(num_gpus=2, kv_gb=0.4)
    slow = replace(node, link=replace(node.link, gpu_to_host_bytes_per_s=5e6))
    rates = []
    for grain in (1, 4):
        rows = uniform_workload(60, 320, 240)
        scenario = engine_scenario(slow, small_model(), LAYOUT, rows, stops_at_drain=True, grain=grain)
        rates.append(run_pipemax(scenario, LAYOUT, (256,), always_in_phases=False)[-1].tokens_per_s)
    assert rates[1] == pytest.approx(rates[0], rel=0.05)


def test_rates_are_those_of_the_rows() -> None:
    """Stock vLLM's and PipeMax's, on GPUs that hold a third of the rows."""
    node = small_node(num_gpus=2, kv_gb=0.4)

    def runs(grain: int) -> list[LayoutRun]:
        rows = uniform_workload(100, 320, 240)
        scenario = engine_scenario(node, small_model(), LAYOUT, rows, stops_at_drain=True, grain=grain)
        return [
            run_stock(scenario, LAYOUT, (256,)),
            *run_pipemax(scenario, LAYOUT, (256,), always_in_phases=False),
        ]

    for fine, coarse in zip(runs(1), runs(4), strict=True):
        assert coarse.tokens_per_s == pytest.approx(fine.tokens_per_s, rel=0.04), str(fine)
