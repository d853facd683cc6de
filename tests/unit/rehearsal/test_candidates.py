"""What an engine config says on a node that is not there."""

from dataclasses import replace
from typing import Any

import pytest

from pipemax.config import EngineConfig, Policy
from pipemax.domain.plan import Batching
from pipemax.domain.units import GIB
from pipemax.rehearsal.candidates import (
    EnginePart,
    best_of_each_family,
    candidates,
    engine_part,
    frees_windows,
    rows_that_fill,
    simulate_candidate,
    unused_fields,
)
from tests.unit.sim.machines import small_model, small_node, small_scenario, small_workload


def config(**values: Any) -> EngineConfig:
    return EngineConfig.parse({"model": "m", **values})


def part(num_gpus: int = 4, **values: Any) -> EnginePart:
    return engine_part(config(**values), small_node(num_gpus=num_gpus), small_model())


def names(**values: Any) -> set[str]:
    return {one.name for one in candidates(config(**values), part(**values))}


def test_what_is_left_open_is_varied() -> None:
    assert names() == {"vllm", "pipemax separated", "pipemax mixed"}
    assert names(policy="pipemax") == {"pipemax separated", "pipemax mixed"}
    assert names(policy="pipemax", batching="mixed") == {"pipemax mixed"}
    assert names(policy="vllm") == {"vllm"}


def test_what_is_set_is_kept() -> None:
    found = candidates(config(max_num_batched_tokens=600, max_num_seqs=64), part())
    assert [(one.name, one.chunk_tokens, one.max_num_seqs) for one in found] == [
        ("vllm", 600, 64),
        ("pipemax separated", 600, 64),
        ("pipemax mixed", 600, 64),
    ]


def test_no_step_has_more_requests_than_tokens() -> None:
    assert all(one.max_num_seqs <= one.chunk_tokens for one in candidates(config(), part()))


@pytest.mark.parametrize("tensor", [1, 4])
def test_auto_has_no_pipemax_with_one_stage(tensor: int) -> None:
    assert names(pipeline_parallel_size=1, tensor_parallel_size=tensor) == {"vllm"}


def test_stages_of_two_gpus_have_the_same_candidates_as_those_of_one() -> None:
    assert names(tensor_parallel_size=2) == names()


def test_the_node_runs_as_many_engines_as_fit_and_each_has_its_share() -> None:
    whole, half = part(), part(pipeline_parallel_size=2)
    assert (whole.num_engines, whole.parallelism.pipeline) == (1, 4)
    assert (half.num_engines, half.node.num_gpus) == (2, 2)
    assert half.node.host_memory_bytes == whole.node.host_memory_bytes / 2
    assert part(tensor_parallel_size=2).parallelism.pipeline == 2


def test_the_configs_memory_replaces_the_profiles() -> None:
    assert part(gpu_memory_utilization=0.5).node.gpu_memory_fraction == 0.5
    assert part(host_kv_gib=3).node.host_kv_bytes == pytest.approx(4 * 3 * GIB)
    with pytest.raises(ValueError, match="host_kv_gib 100 for each of 4 GPUs is more than"):
        part(host_kv_gib=100)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"pipeline_parallel_size": 8}, "8 stages of 1 GPUs, and small has 4"),
        ({"pipeline_parallel_size": 3}, "which 3 do not divide"),
        ({"block_size": 32}, "block_size 32"),
        ({"quantization": "fp8"}, "quantization fp8"),
        ({"dtype": "float32"}, "dtype float32"),
        ({"kv_offload": "per_layer"}, "kv_offload per_layer"),
        ({"enforce_eager": True}, "enforce_eager"),
        ({"vllm": {"speculative_config": {}}}, "vllm: speculative_config"),
    ],
)
def test_what_a_rehearsal_cannot_do_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        part(**values)


def test_fields_without_effect_are_named() -> None:
    assert unused_fields(config(cpu_kv_gib=2, seed=3, check_at_start=False)) == [
        "check_at_start",
        "cpu_kv_gib",
    ]


def test_each_familys_best_is_taken_fastest_first() -> None:
    stock, separated, mixed = (
        [one for one in candidates(config(), part()) if one.name == name]
        for name in ("vllm", "pipemax separated", "pipemax mixed")
    )
    rates = [(stock[0], 5.0), (stock[1], 7.0), (separated[0], 9.0), (separated[1], 3.0), (mixed[0], 8.0)]
    assert best_of_each_family(rates) == [(separated[0], 9.0), (mixed[0], 8.0), (stock[1], 7.0)]


def test_a_candidates_settings_reach_the_simulator() -> None:
    workload, one = small_workload(40), part()
    scenario = small_scenario(workload, one.node)
    for found in candidates(config(), one):
        result = simulate_candidate(found, one, scenario)
        narrow = simulate_candidate(replace(found, max_num_seqs=2), one, scenario)
        assert result.num_requests == 40
        assert narrow.steady_tokens_per_s < 0.8 * result.steady_tokens_per_s, found
    ours = [found for found in candidates(config(), one) if found.policy is Policy.PIPEMAX]
    assert {found.batching for found in ours} == {*Batching}


def test_windows_are_freed_as_the_engine_would() -> None:
    model = replace(small_model(), num_layers=24, window_tokens=64, full_layers=(5, 11, 17, 23))
    workload = replace(small_workload(40), shared_prefix_tokens=0)
    one = engine_part(config(), small_node(num_gpus=4), model)
    unshared = config(enable_prefix_caching=False)
    assert not frees_windows(config(), one, model, workload)
    assert frees_windows(unshared, one, model, workload)
    assert not frees_windows(unshared, one, small_model(), workload)
    assert not frees_windows(unshared, one, replace(model, window_tokens=100_000), workload)
    with pytest.raises(ValueError, match="enable_prefix_caching false: the rows share 7 tokens"):
        frees_windows(unshared, one, model, replace(workload, shared_prefix_tokens=7))


def test_so_many_rows_are_rehearsed_that_the_gpus_are_filled() -> None:
    workload = small_workload(100)
    few, more = (
        rows_that_fill(
            part(), small_model(), replace(workload, prompt_tokens=workload.prompt_tokens * factor)
        )
        for factor in (20, 1)
    )
    assert 200 <= few < more <= 2000
