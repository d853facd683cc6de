"""PipeMax over stages of several GPUs: each has its part of the KV, with a host pool and copies of its own."""

from dataclasses import replace

import pytest

from pipemax.domain.specs import Parallelism
from pipemax.presets import load_node
from pipemax.sim.links import Direction
from pipemax.sim.result import SimulationResult
from pipemax.sim.stage_times import StageTimes
from pipemax.sim.systems.pipemax import PipeMaxSystem
from pipemax.sim.systems.pipemax_config import PipeMaxOptions, stage_configs
from pipemax.sim.systems.scenario import Scenario
from tests.unit.sim.machines import simulate, small_model, small_node, small_scenario, small_workload


def scarce_on_nvlink() -> Scenario:
    """Four GPUs that hold few of the requests at once, and reduce as fast as H100s."""
    node = replace(small_node(kv_gb=0.15, host_gb=12.0), all_reduce=load_node("h100x8").all_reduce)
    return replace(small_scenario(small_workload(300), node), keep_spans=True)


@pytest.fixture(scope="module")
def pairs() -> SimulationResult:
    return simulate("pipemax_t2p2", scarce_on_nvlink())


def test_each_gpu_of_a_stage_copies_its_part_over_its_own_link(pairs: SimulationResult) -> None:
    copied = dict.fromkeys([(direction, gpu) for direction in Direction for gpu in range(4)], 0.0)
    for span in pairs.recording.copy_spans:
        copied[span.direction, span.gpu] += span.num_bytes
    for direction in Direction:
        assert copied[direction, 0] == copied[direction, 1] > 0
        assert copied[direction, 2] == copied[direction, 3] > 0
    # Stages of as many layers: all GPUs have the same part.
    assert copied[Direction.HOST_TO_GPU, 0] == pytest.approx(copied[Direction.HOST_TO_GPU, 2])


def test_every_token_reaches_the_host_once_in_parts(pairs: SimulationResult) -> None:
    stored = sum(
        span.num_bytes for span in pairs.recording.copy_spans if span.direction is Direction.GPU_TO_HOST
    )
    workload = scarce_on_nvlink().workload
    assert pairs.recomputed_tokens == 0
    # The last token of a request is given out, never attended to: it has no KV.
    tokens = workload.total_tokens - len(workload)
    assert stored == pytest.approx(tokens * small_model().kv_bytes_per_token)


@pytest.mark.long  # simulation
def test_where_reducing_is_cheap_pairs_of_gpus_help_pipemax_as_they_help_stock_vllm(
    pairs: SimulationResult,
) -> None:
    scenario = scarce_on_nvlink()
    stock_pairs, stock = (
        simulate(name, scenario).steady_tokens_per_s for name in ("vllm_032_t2p2_512", "vllm_032_pp_512")
    )
    assert stock_pairs > stock
    assert pairs.steady_tokens_per_s > simulate("pipemax", scenario).steady_tokens_per_s
    assert simulate("pipemax_t2p2_mixed_512", scenario).steady_tokens_per_s > stock_pairs


def test_a_stage_is_described_by_one_of_its_gpus() -> None:
    node, model = scarce_on_nvlink().node, small_model()
    alone, shared = (
        stage_configs(node, StageTimes(node, model, Parallelism(pipeline=2, tensor=tensor)), PipeMaxOptions())
        for tensor in (1, 2)
    )
    for one, pair in zip(alone, shared, strict=True):
        assert pair.kv_bytes_per_token * 2 == one.kv_bytes_per_token
        # The same link, in pieces of half the size; there are two of them.
        assert one.h2d_bytes_per_s / 2 < pair.h2d_bytes_per_s < one.h2d_bytes_per_s


def test_stages_that_do_not_divide_the_node_are_refused() -> None:
    with pytest.raises(ValueError, match="3 GPUs a stage do not divide the node's 4"):
        PipeMaxSystem(small_scenario(), PipeMaxOptions(tensor=3))
