"""PipeMax with mixed batching in the simulator: the same controller, on the same machine."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pipemax.control.controller import Controller
from pipemax.control.controller_config import ControllerConfig
from pipemax.control.decision_trace import replay
from pipemax.domain.plan import Batching, Phase
from pipemax.presets import load_model, load_node, load_workload
from pipemax.sim.result import SimulationResult
from pipemax.sim.systems.pipemax import PipeMaxSystem
from pipemax.sim.systems.pipemax_config import PipeMaxOptions
from pipemax.sim.systems.scenario import Scenario
from pipemax.sim.workloads import draw_workload
from tests.unit.sim.machines import simulate, small_node, small_scenario, small_workload

SCENARIO = small_scenario(small_workload(150, name="longbench"), small_node(kv_gb=1.0))


@pytest.fixture(scope="module")
def mixed() -> SimulationResult:
    return simulate("pipemax_mixed_256", SCENARIO)


def test_mixed_batches_are_faster_than_separated_ones(mixed: SimulationResult) -> None:
    separated = simulate("pipemax", SCENARIO)
    assert mixed.steady_tokens_per_s > 1.1 * separated.steady_tokens_per_s
    assert mixed.total_tokens_per_s > separated.total_tokens_per_s


def test_most_steps_have_decodes_and_prompts_while_prompts_wait(mixed: SimulationResult) -> None:
    assert mixed.decode_fraction < 0.5
    assert mixed.h2d_bytes > 0


def test_its_decisions_replay_and_keep_to_the_maximum_of_tokens(tmp_path: Path) -> None:
    scenario = replace(
        SCENARIO, workload=small_workload(30, name="longbench"), decisions_path=tmp_path / "decisions.jsonl"
    )
    simulate("pipemax_mixed_256", scenario)
    pairs = list(replay(tmp_path / "decisions.jsonl"))
    assert all(recorded == now for recorded, now in pairs)
    assert {plan.phase for plan, _ in pairs} == {Phase.MIXED}
    assert max(sum(plan.run_tokens) for plan, _ in pairs) == 256


class KeptController(PipeMaxSystem):
    """A system whose controller can be asked afterwards."""

    def make_controller(self, config: ControllerConfig) -> Controller:
        self.controller = super().make_controller(config)
        return self.controller


def test_its_step_times_are_predicted_within_the_paper_s_errors() -> None:
    """PipeMax, §4.3.1: within 8 %; the profile holds no mixed step."""
    options = PipeMaxOptions(controller={"batching": Batching.MIXED, "mixed_step_tokens": 256})
    system = KeptController(replace(SCENARIO, workload=small_workload(60, name="longbench")), options)
    system.simulate()
    for error in system.controller.times.decode_error():
        assert error.num_steps > 100
        assert error.worst < 0.08


@pytest.mark.long  # half a minute of simulation
def test_large_steps_do_not_fall_behind_once_much_kv_waits() -> None:
    """Their prompts come faster than outputs end; the throttle's smaller steps keep the two level."""
    scenario = Scenario(
        node=load_node("rtx5090x8"),
        model=load_model("llama2-70b"),
        workload=draw_workload(load_workload("longbench"), 2000, np.random.default_rng(0)),
        stops_at_drain=True,
    )
    small, large = (simulate(f"pipemax_mixed_{tokens}", scenario) for tokens in (512, 2048))
    assert large.steady_tokens_per_s > 0.97 * small.steady_tokens_per_s
