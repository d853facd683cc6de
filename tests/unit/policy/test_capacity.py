"""What a table would cost under every layout and policy of a node, and which of them is chosen."""

import numpy as np
import pytest

from pipemax.domain.plan import Batching
from pipemax.domain.specs import NodeSpec
from pipemax.domain.tuned import WORTHWHILE_GAIN
from pipemax.policy.capacity import CapacityPlan, options_of, plan_capacity
from pipemax.policy.compare import ChosenPolicy
from pipemax.policy.layout_runs import LARGE_STEPS, StepSizes, engine_scenario, run_pipemax
from pipemax.policy.layouts import Layout, possible_layouts
from pipemax.presets import load_model, load_node, load_workload, override
from pipemax.sim.systems.continuous import ContinuousBatching, stock_vllm
from pipemax.sim.systems.scenario import Scenario
from pipemax.sim.workloads import SampledRows, draw_workload
from tests.unit.sim.machines import small_model, small_node

SHAREGPT = load_workload("sharegpt")
FEW_SIZES = StepSizes(stock=(512, 2048), mixed=(512,), mixed_of_short_tables=(512,))
"""Which size of a step is the fastest is ``test_measured_choice``'s business: here each costs a simulation."""


def plan_on(
    node: NodeSpec, sample_rows: int, *, gpus_per_engine: tuple[int, ...] = (), rows: int | None = None
) -> CapacityPlan:
    """Plan a table that is simulated as a whole, unless ``rows`` says how many there are."""
    return plan_capacity(
        node,
        small_model(),
        SHAREGPT,
        rows=sample_rows if rows is None else rows,
        price_per_hour=10.0,
        gpus_per_engine=gpus_per_engine or (node.num_gpus,),
        sample_rows=sample_rows,
        sizes=FEW_SIZES,
    )


def test_a_node_is_divided_in_every_way() -> None:
    layouts = possible_layouts(small_node(num_gpus=4))
    assert all(layout.replicas * layout.gpus_per_engine == 4 for layout in layouts)
    divided = [(one.replicas, one.tensor_parallel, one.pipeline_parallel) for one in layouts]
    assert divided == [(1, 1, 4), (1, 2, 2), (1, 4, 1), (2, 1, 2), (2, 2, 1), (4, 1, 1)]
    with pytest.raises(ValueError, match="has 4 GPUs, which 3 do not divide"):
        possible_layouts(small_node(num_gpus=4), [3])


def test_an_engine_of_one_stage_may_take_steps_as_large_as_vllm_s_default() -> None:
    """Prompts of 2,000 tokens and answers of 8 fill larger steps than 4,096 tokens."""
    rows = SampledRows(prompt_tokens=(2000,), outputs=(8,))
    plan = plan_capacity(load_node("1xH100"), load_model("qwen3-8b"), rows, rows=10**6, sizes=FEW_SIZES)
    assert plan.chosen.chunk_tokens in LARGE_STEPS


@pytest.mark.long  # simulation
def test_options_are_ordered_by_speed_and_hours_and_cost_are_those_of_the_whole_table() -> None:
    plan = plan_on(small_node(num_gpus=4, kv_gb=0.8), 270, gpus_per_engine=(4,), rows=1_000_000)
    speeds = [option.tokens_per_s for option in plan.options]
    assert speeds == sorted(speeds, reverse=True)
    for option in plan.options:
        bulk_hours = 1_000_000 * 580.96 / option.tokens_per_s / 3600
        assert option.hours == pytest.approx(bulk_hours, rel=0.02), "the drain of 270 rows is no part of that"
        assert option.cost == pytest.approx(10.0 * option.hours)
        runs_pipemax = option.policy is ChosenPolicy.PIPEMAX
        assert (option.batching is not None) is runs_pipemax
        if runs_pipemax:
            assert option.layout.pipeline_parallel > 1
    assert {option.batching for option in plan.options} == {None, *Batching}
    with_pipemax = {
        (o.layout.tensor_parallel, o.layout.pipeline_parallel) for o in plan.options if o.batching
    }
    assert with_pipemax == {(1, 4), (2, 2)}


@pytest.mark.long  # simulation
def test_replicas_work_side_by_side_and_drain_together() -> None:
    """One engine's own run, by its own simulation, says what two of them take."""
    node = small_node(num_gpus=4, kv_gb=12.0)
    plan = plan_on(node, 440, gpus_per_engine=(2,), rows=1_000_000)
    layout = Layout(replicas=2, tensor_parallel=1, pipeline_parallel=2)
    (option,) = (o for o in plan.options if o.layout == layout and o.policy is ChosenPolicy.VLLM)
    workload = draw_workload(SHAREGPT, 440, np.random.default_rng(0))
    scenario = Scenario(node=node.part(2), model=small_model(), workload=workload)
    policy = stock_vllm(option.chunk_tokens, max_num_seqs=1024, keeps_preempted=True)
    single = ContinuousBatching(scenario, policy).simulate()
    assert option.tokens_per_s == pytest.approx(2 * single.steady_tokens_per_s)
    tokens = 1_000_000 * workload.total_tokens / 440
    drain_s = single.seconds - single.steady_seconds
    drained = workload.total_tokens - single.steady_tokens_per_s * single.steady_seconds
    seconds = (tokens - 2 * drained) / (2 * single.steady_tokens_per_s) + drain_s
    assert option.hours == pytest.approx(seconds / 3600)


def test_a_short_table_takes_what_its_simulation_takes() -> None:
    node = small_node(num_gpus=2, kv_gb=2.0)
    layout = Layout(replicas=1, tensor_parallel=1, pipeline_parallel=2)
    plan = plan_on(node, 50)
    (option,) = (o for o in plan.options if o.layout == layout and o.policy is ChosenPolicy.VLLM)
    workload = draw_workload(SHAREGPT, 50, np.random.default_rng(0))
    policy = stock_vllm(option.chunk_tokens, max_num_seqs=1024, keeps_preempted=True)
    run = ContinuousBatching(Scenario(node=node, model=small_model(), workload=workload), policy).simulate()
    assert option.hours == pytest.approx(run.seconds / 3600)


def test_a_long_table_takes_as_long_in_grains() -> None:
    """PipeMax's rows are simulated in grains of four tokens, or else token by token."""
    node = small_node(num_gpus=2, kv_gb=0.4)
    layout = Layout(replicas=1, tensor_parallel=1, pipeline_parallel=2)
    sample = draw_workload(SHAREGPT, 200, np.random.default_rng(0))
    fine = run_pipemax(engine_scenario(node, small_model(), layout, sample), layout, FEW_SIZES.mixed)[-1]
    coarse = options_of(node, small_model(), layout, sample, rows=200_000, with_stock=False, sizes=FEW_SIZES)[
        -1
    ]
    assert fine.tokens_per_s == pytest.approx(coarse.tokens_per_s, rel=0.06)
    tokens = 200_000 * sample.tokens_per_row
    assert coarse.hours == pytest.approx(tokens / fine.tokens_per_s / 3600, rel=0.08)


def test_nothing_is_calculated_from_rows_that_do_not_fill_the_engines() -> None:
    with pytest.raises(ValueError, match="60 rows fill the engines of no layout"):
        plan_on(small_node(num_gpus=4), 60, rows=1_000_000)


@pytest.mark.long  # simulation
def test_what_does_not_fit_is_left_out_with_the_reason() -> None:
    plan = plan_on(small_node(num_gpus=4), 60, gpus_per_engine=(4, 1))
    assert {option.layout.gpus_per_engine for option in plan.options} == {4}
    assert any("4 × tp 1 × pp 1" in reason and "does not fit" in reason for reason in plan.not_possible)


@pytest.mark.long  # simulation
def test_heads_that_gpus_do_not_divide_are_left_out() -> None:
    plan = plan_on(small_node(num_gpus=6, kv_gb=1.0), 60)
    assert any(
        "tp 6" in reason and "heads, which 6 GPUs do not divide" in reason for reason in plan.not_possible
    )


def test_if_no_layout_fits_the_error_says_why() -> None:
    node = override(small_node(), {"gpu.memory_bytes": 4e9})
    with pytest.raises(ValueError, match="the weights leave no room"):
        plan_on(node, 50)


@pytest.mark.long  # simulation; test_layout_choice has it of layouts
def test_a_fast_all_reduce_makes_stock_vllm_with_tensor_parallelism_the_choice() -> None:
    fast = override(small_node(), {"all_reduce.bus_bytes_per_s": 1e13, "all_reduce.latency_s": 0.0})
    plan = plan_on(fast, 150)
    assert plan.chosen.policy is ChosenPolicy.VLLM
    assert plan.chosen.layout.tensor_parallel > 1
    assert "PipeMax gains less than 2%" in plan.reason


@pytest.mark.long  # minutes of simulation
def test_a_slow_all_reduce_and_scarce_memory_make_pipemax_the_choice() -> None:
    slow = override(small_node(num_gpus=8, kv_gb=1.0), {"all_reduce.bus_bytes_per_s": 5e8})
    plan = plan_on(slow, 400)
    assert plan.chosen.policy is ChosenPolicy.PIPEMAX
    stock = max(o.tokens_per_s for o in plan.options if o.policy is ChosenPolicy.VLLM)
    assert plan.chosen.tokens_per_s >= WORTHWHILE_GAIN * stock
    assert str(plan.chosen) in plan.reason
    tensor = next(o for o in plan.options if o.layout.tensor_parallel == 8)
    assert tensor.limited_by.startswith("all-reduce")
