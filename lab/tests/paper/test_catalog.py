"""The systems by name: each gives out every token, and each shows what its policy is known for."""

import numpy as np
import pytest

from lab.paper.catalog import pipemax_layout_names, simulate, system_names
from pipemax.sim.workloads import Workload
from tests.unit.sim.machines import small_node, small_scenario, small_workload
from tests.unit.sim.systems.test_systems import check

ALL = system_names(small_node())


@pytest.mark.parametrize("system", ALL)
def test_every_request_finishes(system: str) -> None:
    workload = small_workload(80)
    check(simulate(system, small_scenario(workload)), workload)


@pytest.mark.parametrize("system", ALL)
def test_every_request_finishes_when_the_gpu_holds_a_few_and_the_host_not_all(system: str) -> None:
    workload = small_workload(80)
    node = small_node(kv_gb=0.4, host_gb=5.0)
    check(simulate(system, small_scenario(workload, node)), workload)


@pytest.mark.parametrize("system", ALL)
def test_templated_prompts_finish(system: str) -> None:
    workload = small_workload(60, name="templated")
    check(simulate(system, small_scenario(workload)), workload)


@pytest.mark.parametrize("system", ALL)
def test_one_token_outputs_finish(system: str) -> None:
    workload = Workload(name="ones", prompt_tokens=np.full(20, 33), output_tokens=np.ones(20, dtype=np.int64))
    check(simulate(system, small_scenario(workload)), workload)


@pytest.mark.parametrize("system", ["td_pipe", "seesaw_t4"])
def test_the_same_scenario_gives_the_same_result(system: str) -> None:
    first, again = (simulate(system, small_scenario(small_workload(80))) for _ in range(2))
    assert first.seconds == again.seconds
    assert first.recording.decode_samples == again.recording.decode_samples


def test_an_unknown_system_is_refused_with_the_known_names() -> None:
    with pytest.raises(ValueError, match="pipemax, vllm_tp"):
        simulate("orca", small_scenario())


def test_offloading_streams_the_weights_all_the_time() -> None:
    result = simulate("flexgen", small_scenario(node=small_node(kv_gb=0.15)))
    assert result.h2d_fraction > 0.5
    assert result.h2d_bytes > 0


def test_the_names_say_how_many_gpus_share_a_stage() -> None:
    mixed = [f"mixed_{tokens}" for tokens in (256, 512, 1024, 2048, 4096)]
    layouts = ["pipemax_t4p2", "pipemax_t2p4"]
    expected = [name for layout in layouts for name in (layout, *(f"{layout}_{size}" for size in mixed))]
    assert pipemax_layout_names(small_node(num_gpus=8)) == expected
    assert pipemax_layout_names(small_node(num_gpus=2)) == []
