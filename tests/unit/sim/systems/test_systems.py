"""Every system gives out every token, whatever the pools; and each shows what its policy is known for."""

import itertools

import numpy as np
import pytest

from pipemax.sim.result import SimulationResult
from pipemax.sim.systems.scenario import Scenario
from pipemax.sim.workloads import Workload
from tests.unit.sim.machines import SYSTEMS, simulate, small_node, small_scenario, small_workload


def check(result: SimulationResult, workload: Workload) -> None:
    """That every request finished once is asserted within; here, that the figures are possible."""
    assert result.num_requests == len(workload)
    assert result.output_tokens == int(workload.output_tokens.sum())
    assert result.total_tokens_per_s * result.seconds == pytest.approx(workload.total_tokens)
    assert 0 <= result.bubble_fraction < 1
    assert 0 <= result.h2d_fraction <= 1
    assert 0 <= result.all_reduce_fraction < 1
    assert result.steady_tokens_per_s > 0


@pytest.mark.parametrize("system", SYSTEMS)
def test_every_request_finishes_when_the_gpu_holds_a_few_and_the_host_not_all(system: str) -> None:
    workload = small_workload(80)
    node = small_node(kv_gb=0.4, host_gb=5.0)
    check(simulate(system, small_scenario(workload, node)), workload)


@pytest.mark.parametrize("system", ["vllm_032_pp", "pipemax", "pipemax_mixed_512"])
def test_templated_prompts_finish(system: str) -> None:
    workload = small_workload(60, name="templated")
    check(simulate(system, small_scenario(workload)), workload)


@pytest.mark.parametrize("system", ["pipemax", "vllm_pp"])
def test_the_same_scenario_gives_the_same_result(system: str) -> None:
    first, again = (simulate(system, small_scenario(small_workload(80))) for _ in range(2))
    assert first.seconds == again.seconds
    assert first.recording.decode_samples == again.recording.decode_samples


def test_a_request_that_never_fits_is_refused() -> None:
    workload = Workload(
        name="long", prompt_tokens=np.array([90_000]), output_tokens=np.array([9], dtype=np.int64)
    )
    with pytest.raises(ValueError, match="does not fit"):
        simulate("vllm_tp", small_scenario(workload, small_node(kv_gb=0.05)))


def test_stages_run_one_step_at_a_time_in_the_order_submitted() -> None:
    scenario = small_scenario()
    scenario = Scenario(node=scenario.node, model=scenario.model, workload=scenario.workload, keep_spans=True)
    spans = simulate("vllm_032_pp", scenario).recording.stage_spans
    for stage in range(scenario.node.num_gpus):
        own = [span for span in spans if span.stage == stage]
        assert [span.step_number for span in own] == sorted(span.step_number for span in own)
        assert all(a.end_s <= b.start_s + 1e-9 for a, b in itertools.pairwise(own))


def test_balanced_decode_batches_are_of_one_size_where_stock_vllms_are_not() -> None:
    """Compare as many consecutive decode steps as there are stages; steps with prompts are left out."""

    def spread(system: str) -> float:
        samples = simulate(system, small_scenario()).recording.decode_samples
        batches = np.array([sample.batch for sample in samples])
        in_turn = np.lib.stride_tricks.sliding_window_view(batches, small_node().num_gpus)
        return float(np.mean((in_turn.max(axis=1) - in_turn.min(axis=1)) / in_turn.mean(axis=1)))

    assert spread("vllm_032_pp_512") > 0.3
    assert spread("vllm_032_balanced_512") < 0.1


def test_balanced_decode_batches_make_stock_vllm_faster() -> None:
    """By less than 1 % here: half of so small a run has prompts left, which level the batches."""
    stock, balanced = (
        simulate(system, small_scenario()) for system in ("vllm_032_pp_512", "vllm_032_balanced_512")
    )
    assert balanced.total_tokens_per_s > stock.total_tokens_per_s
    assert balanced.bubble_fraction < stock.bubble_fraction


def test_little_memory_preempts_and_recomputes() -> None:
    tight = simulate("vllm_032_pp", small_scenario(node=small_node(kv_gb=0.2)))
    ample = simulate("vllm_032_pp", small_scenario(node=small_node(kv_gb=4.0)))
    assert tight.recomputed_tokens > ample.recomputed_tokens == 0
    assert tight.total_tokens_per_s < ample.total_tokens_per_s


def test_tensor_parallel_spends_its_time_in_all_reduces() -> None:
    assert simulate("vllm_tp", small_scenario()).all_reduce_fraction > 0.3
    assert simulate("vllm_pp", small_scenario()).all_reduce_fraction == 0.0
