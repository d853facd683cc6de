"""A simulation that ends as soon as its rate is too low."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from pipemax.sim.result import SimulationResult
from pipemax.sim.systems.continuous import ContinuousBatching, stock_vllm
from pipemax.sim.systems.pipemax import PipeMaxSystem
from pipemax.sim.systems.pipemax_config import PipeMaxOptions, mixed_batching
from pipemax.sim.systems.scenario import Scenario
from tests.unit.sim.machines import small_model, small_node
from tests.unit.sim.systems.test_pipemax import uniform_workload


def stock(scenario: Scenario) -> SimulationResult:
    return ContinuousBatching(scenario, stock_vllm(256)).simulate()


def pipemax(scenario: Scenario) -> SimulationResult:
    return PipeMaxSystem(scenario, PipeMaxOptions(controller=mixed_batching(256))).simulate()


@pytest.mark.parametrize("simulate", [stock, pipemax])
def test_a_slow_run_ends_early_and_a_fast_one_as_without_the_limit(
    simulate: Callable[[Scenario], SimulationResult],
) -> None:
    scenario = Scenario(
        node=small_node(num_gpus=2, kv_gb=0.3),
        model=small_model(),
        workload=uniform_workload(90, 320, 60),
        stops_at_drain=True,
    )
    steps = list[int]()
    whole = simulate(replace(scenario, on_progress=steps.append))
    num_steps = len(steps)
    kept = simulate(replace(scenario, stops_below=0.999 * whole.steady_tokens_per_s))
    assert not kept.fell_below
    assert kept.steady_tokens_per_s == whole.steady_tokens_per_s
    steps.clear()
    given_up = simulate(
        replace(scenario, stops_below=2 * whole.steady_tokens_per_s, on_progress=steps.append)
    )
    assert given_up.fell_below
    assert whole.steady_tokens_per_s <= given_up.steady_tokens_per_s < 2 * whole.steady_tokens_per_s
    assert len(steps) < 0.5 * num_steps
