"""The ablations run, and each costs what the paper says that it costs."""

import pytest

from lab.paper.ablations import (
    LayerFirstSystem,
    NoActivationPrioritySystem,
    StaticPrefetchSystem,
    VictimPolicy,
    VictimSystem,
)
from pipemax.sim.result import SimulationResult
from pipemax.sim.systems.pipemax import PipeMaxSystem
from pipemax.sim.systems.pipemax_config import PipeMaxOptions
from pipemax.sim.systems.scenario import Scenario
from tests.unit.sim.machines import small_node, small_scenario
from tests.unit.sim.systems.test_pipemax import steady_means, uniform_workload


@pytest.fixture
def scenario() -> Scenario:
    return small_scenario(uniform_workload(500, 300, 160), small_node(kv_gb=1.0))


@pytest.fixture
def pipemax(scenario: Scenario) -> SimulationResult:
    return PipeMaxSystem(scenario).simulate()


def test_layer_first_copies_the_same_slower(scenario: Scenario, pipemax: SimulationResult) -> None:
    layer_first = LayerFirstSystem(scenario).simulate()
    assert layer_first.total_tokens_per_s < pipemax.total_tokens_per_s
    assert steady_means(layer_first)[1] < steady_means(pipemax)[1]


def test_activations_behind_prefetches_cost_throughput(scenario: Scenario, pipemax: SimulationResult) -> None:
    assert NoActivationPrioritySystem(scenario).simulate().seconds > pipemax.seconds


def test_a_fixed_share_is_copied_in_each_step(scenario: Scenario, pipemax: SimulationResult) -> None:
    few, many = (
        steady_means(StaticPrefetchSystem(scenario, PipeMaxOptions(), fraction=share).simulate())[1]
        for share in (0.02, 0.04)
    )
    assert many == pytest.approx(2 * few, rel=0.2)


def test_an_order_of_eviction_changes_the_run_and_the_product_s_own_does_not(
    scenario: Scenario, pipemax: SimulationResult
) -> None:
    seconds = {
        policy: VictimSystem(scenario, PipeMaxOptions(), policy=policy).simulate().seconds
        for policy in VictimPolicy
    }
    assert seconds.pop(VictimPolicy.LONGEST_FIRST) == pipemax.seconds
    assert pipemax.seconds not in seconds.values()
