"""The choice between PipeMax and stock vLLM, and what a table would cost."""

import pytest

from pipemax.domain.specs import NodeSpec
from pipemax.policy.compare import ChosenPolicy, PolicyChoice, plan_capacity
from pipemax.presets import load_workload, override
from tests.unit.sim.machines import small_model, small_node

SHAREGPT = load_workload("sharegpt")


def choice_on(node: NodeSpec, sample_requests: int) -> PolicyChoice:
    """With one engine on all GPUs."""
    return plan_capacity(
        node,
        small_model(),
        SHAREGPT,
        rows=1,
        price_per_hour=0.0,
        gpus_per_engine=[node.num_gpus],
        sample_requests=sample_requests,
    ).choice


def test_plan_orders_options_and_reckons_hours_and_cost() -> None:
    node = small_node(num_gpus=8, kv_gb=0.8)
    plan = plan_capacity(
        node, small_model(), SHAREGPT, rows=1_000_000, price_per_hour=10.0, sample_requests=150
    )
    speeds = [option.tokens_per_s for option in plan.options]
    assert speeds == sorted(speeds, reverse=True)
    assert plan.best is plan.options[0]
    for option in plan.options:
        assert option.hours == pytest.approx(1_000_000 * 580.96 / option.tokens_per_s / 3600, rel=0.01)
        assert option.cost == pytest.approx(10.0 * option.hours)
    assert {"pipemax", "vllm_032_pp", "vllm_tp"} == {option.system for option in plan.options}


def test_pipeline_degrees_that_do_not_fit_are_reported_and_left_out() -> None:
    node = small_node(num_gpus=4)
    plan = plan_capacity(
        node,
        small_model(),
        SHAREGPT,
        rows=10,
        price_per_hour=1.0,
        gpus_per_engine=[4, 1],
        sample_requests=60,
    )
    assert {option.gpus_per_engine for option in plan.options} == {4}
    assert any("1 GPUs an engine" in reason and "does not fit" in reason for reason in plan.not_possible)


def test_if_no_layout_fits_the_error_says_why() -> None:
    node = override(small_node(), {"gpu.memory_bytes": 4e9})
    with pytest.raises(ValueError, match="the weights leave no room"):
        choice_on(node, 50)


def test_fast_all_reduce_makes_stock_vllm_the_choice() -> None:
    fast = override(small_node(), {"all_reduce.bus_bytes_per_s": 1e13, "all_reduce.latency_s": 0.0})
    choice = choice_on(fast, 150)
    assert choice.chosen is ChosenPolicy.VLLM
    assert choice.inputs["vllm_system"] == "vllm_tp"
    assert f"{choice.speedup:.2f}×" in choice.reason


def test_slow_all_reduce_and_scarce_memory_make_pipemax_the_choice() -> None:
    slow = override(small_node(num_gpus=8, kv_gb=0.6), {"all_reduce.bus_bytes_per_s": 5e9})
    choice = choice_on(slow, 250)
    assert choice.chosen is ChosenPolicy.PIPEMAX
    assert choice.speedup > 1.0
