"""What an engine config leaves open of the layout, settled before an engine starts."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipemax.config import EngineConfig, Policy
from pipemax.control.times.calibration import Calibration, save_calibration
from pipemax.domain.hardware import AllReduceSpec
from pipemax.domain.specs import NodeSpec, Parallelism
from pipemax.policy.layout_start import SettledLayout, settle_layout
from pipemax.sim.stage_times import StageTimes
from pipemax.sim.systems.pipemax_config import PipeMaxOptions, stage_configs
from tests.unit.sim.machines import small_model, small_node

GPUS = ["GPU-0", "GPU-1"]
NOTHING_KEPT = {"XDG_CACHE_HOME": "/nowhere"}
LENGTHS = {"prompt_tokens": [200, 300, 400], "max_tokens": 200, "rows": 100}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Shapes of the tests' small model, without weights."""
    shapes = {
        "model_type": "llama",
        "num_hidden_layers": 20,
        "hidden_size": 8192,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "intermediate_size": 28672,
        "vocab_size": 32000,
        "max_position_embeddings": 4096,
    }
    (tmp_path / "config.json").write_text(json.dumps(shapes), encoding="utf-8")
    return tmp_path


def two_gpus(*, bus_bytes_per_s: float) -> NodeSpec:
    node = small_node(num_gpus=2, kv_gb=2.0, host_gb=8.0)
    return replace(node, all_reduce=AllReduceSpec(bus_bytes_per_s=bus_bytes_per_s, latency_s=0.0))


def settle(
    checkpoint: Path,
    *,
    gpus: Sequence[str] = GPUS,
    node: NodeSpec | None = None,
    environ: Mapping[str, str] = NOTHING_KEPT,
    gpu_bytes: int | None = None,
    **settings: Any,
) -> SettledLayout:
    def describe(environ: Mapping[str, str], shown: Sequence[str]) -> NodeSpec:
        if node is None:
            raise ValueError("the rates of a Voodoo 2 are not known")
        return node

    config = EngineConfig.parse(
        {"model": str(checkpoint), "policy": "vllm", "row_lengths": LENGTHS, **settings}
    )
    return settle_layout(
        config, environ, gpus, describe_machine=describe, gpu_bytes=lambda environ, gpus: gpu_bytes
    )


def parts_of(config: EngineConfig) -> tuple[int | None, int | None, int | None]:
    return config.replicas, config.tensor_parallel_size, config.pipeline_parallel_size


def test_links_decide_what_the_config_leaves_open(checkpoint: Path) -> None:
    fast = settle(checkpoint, node=two_gpus(bus_bytes_per_s=1e15))
    slow = settle(checkpoint, node=two_gpus(bus_bytes_per_s=1e8))
    assert parts_of(fast.config) == (1, 2, 1)
    assert parts_of(slow.config) == (1, 1, 2)
    assert fast.reason.startswith("1 × tp 2 × pp 1: simulated ")
    assert fast.reason.endswith("by the profile of small and sampled rows")


def test_a_table_of_a_few_rows_is_simulated_to_its_end(checkpoint: Path) -> None:
    node = two_gpus(bus_bytes_per_s=1e10)
    rates = [
        settle(checkpoint, node=node, row_lengths={**LENGTHS, "rows": rows}).reason.split()[8]
        for rows in (300, 1_000_000)
    ]
    few, many = (float(rate.replace(",", "")) for rate in rates)
    assert few < 0.95 * many, "the engine runs empty at the end of a short table"


def test_what_the_config_fixes_stays(checkpoint: Path) -> None:
    fast = two_gpus(bus_bytes_per_s=1e15)
    assert parts_of(settle(checkpoint, node=fast, pipeline_parallel_size=2).config) == (1, 1, 2)
    whole = {"replicas": 1, "tensor_parallel_size": 1, "pipeline_parallel_size": 2}
    settled = settle(checkpoint, node=fast, **whole)
    assert (parts_of(settled.config), settled.reason) == ((1, 1, 2), ""), "there was nothing to choose"


def test_a_layout_is_chosen_with_waves_where_they_are_on(checkpoint: Path) -> None:
    """In one of two layouts PipeMax runs, and faster with waves."""
    node, long_table = small_node(num_gpus=2, kv_gb=0.4, host_gb=8.0), {**LENGTHS, "rows": 1_000_000}
    settled = [
        settle(checkpoint, node=node, policy="pipemax", waves=waves, row_lengths=long_table)
        for waves in ("off", "on")
    ]
    assert {parts_of(one.config) for one in settled} == {(1, 1, 2)}
    without, waves = (
        float(one.reason.partition("simulated ")[2].split()[0].replace(",", "")) for one in settled
    )
    assert waves > 1.02 * without


def test_a_layout_under_vllms_own_arguments_is_left_to_them(checkpoint: Path) -> None:
    settled = settle(checkpoint, node=two_gpus(bus_bytes_per_s=1e15), vllm={"tensor_parallel_size": 2})
    assert (parts_of(settled.config), settled.reason) == ((None, None, None), "")


def test_with_fewer_than_two_gpus_there_is_nothing_to_choose(checkpoint: Path) -> None:
    for gpus in ([], ["GPU-0"]):
        settled = settle(checkpoint, gpus=gpus, node=two_gpus(bus_bytes_per_s=1e15))
        assert (parts_of(settled.config), settled.reason) == ((None, None, None), "")


def test_without_a_size_of_the_gpus_all_of_them_share_each_layer_and_the_reason_is_said(
    checkpoint: Path,
) -> None:
    settled = settle(checkpoint, policy="auto")
    assert (parts_of(settled.config), settled.config.policy) == ((1, 2, 1), Policy.VLLM)
    assert settled.reason == (
        "1 × tp 2 × pp 1 with stock vLLM: the most GPUs for a replica, for the GPUs' memory is not known; set replicas "
        "if fewer hold the model; for layouts could not be simulated: the rates of a Voodoo 2 are not known"
    )


def test_without_weight_files_the_models_shapes_say_how_many_gpus_hold_it(checkpoint: Path) -> None:
    gpus = [f"GPU-{number}" for number in range(4)]
    settled = settle(checkpoint, gpus=gpus, gpu_bytes=80 * 10**9, policy="auto")
    assert parts_of(settled.config) == (4, 1, 1), "1.2 × 35 ≤ 80 % of 80 GB"
    assert "GB of weights × 1.2" in settled.reason


def test_a_model_of_unknown_size_is_shared_by_all_gpus(checkpoint: Path) -> None:
    unknown = {"model_type": "mamba", "hidden_size": 2048, "vocab_size": 32000}
    (checkpoint / "config.json").write_text(json.dumps(unknown), encoding="utf-8")
    settled = settle(checkpoint, gpu_bytes=80 * 10**9, policy="auto")
    assert settled.config.policy is Policy.VLLM
    assert "for the size of the model is not known" in settled.reason
    assert settled.config.replicas == 1


@pytest.mark.parametrize(
    ("weights_gb", "layout"),
    [
        (40, (4, 1, 1)),  # 1.2 × 40 ≤ 80 % of 80 GB
        (60, (2, 2, 1)),
        (200, (1, 4, 1)),
        (400, (1, 4, 1)),  # too large by this rule: vLLM may still fit it
    ],
)
def test_on_an_unknown_machine_replicas_have_as_few_gpus_as_hold_the_model(
    checkpoint: Path, weights_gb: int, layout: tuple[int, int, int]
) -> None:
    write_weights(checkpoint, weights_gb)
    gpus = [f"GPU-{number}" for number in range(4)]
    settled = settle(checkpoint, gpus=gpus, gpu_bytes=80 * 10**9, policy="auto", gpu_memory_utilization=0.9)
    assert parts_of(settled.config) == layout
    assert settled.config.policy is Policy.VLLM
    assert f"with stock vLLM: the fewest GPUs that hold {weights_gb}.0 GB of weights × 1.2" in settled.reason
    assert settled.reason.endswith("could not be simulated: the rates of a Voodoo 2 are not known")


def test_a_model_that_pipemax_refuses_gets_the_layout_in_which_stock_vllm_is_fastest(
    checkpoint: Path,
) -> None:
    config = checkpoint / "config.json"
    hybrid = {"model_type": "qwen3_next", "num_hidden_layers": 4, "hidden_size": 2048, "vocab_size": 32000}
    config.write_text(json.dumps({**hybrid, "max_position_embeddings": 4096}), encoding="utf-8")
    settled = settle(checkpoint, node=two_gpus(bus_bytes_per_s=1e15), policy="auto")
    assert "simulated" in settled.reason
    assert "PipeMax" not in settled.reason


def test_heads_that_do_not_divide_make_stages_of_the_gpus_that_hold_a_model(checkpoint: Path) -> None:
    write_weights(checkpoint, 120)
    gpus = [f"GPU-{number}" for number in range(3)]
    settled = settle(checkpoint, gpus=gpus, gpu_bytes=80 * 10**9)
    assert parts_of(settled.config) == (1, 1, 3), "64 heads and 3 GPUs"


def test_what_the_config_says_of_the_layout_stays_on_an_unknown_machine(checkpoint: Path) -> None:
    write_weights(checkpoint, 40)
    gpus = [f"GPU-{number}" for number in range(4)]
    settled = settle(checkpoint, gpus=gpus, gpu_bytes=80 * 10**9, pipeline_parallel_size=2)
    assert parts_of(settled.config) == (2, 1, 2)
    pipemax = settle(checkpoint, gpus=gpus, gpu_bytes=80 * 10**9, policy="pipemax")
    assert parts_of(pipemax.config) == (None, None, None), "PipeMax, asked for by name, needs stages"
    assert pipemax.config.policy is Policy.PIPEMAX


def write_weights(checkpoint: Path, gigabytes: int) -> None:
    """Write a sparse file of weights, which takes no room on the disk."""
    with (checkpoint / "model.safetensors").open("wb") as stream:
        stream.truncate(gigabytes * 10**9)


def test_a_model_too_large_for_every_layout_is_refused_before_an_engine_starts(checkpoint: Path) -> None:
    with pytest.raises(ValueError, match=r"no layout of small runs .*does not fit"):
        settle(checkpoint, node=two_gpus(bus_bytes_per_s=1e15), gpu_memory_utilization=0.2)


def test_without_sampled_rows_the_reason_says_so(checkpoint: Path) -> None:
    settled = settle(checkpoint, node=two_gpus(bus_bytes_per_s=1e15), row_lengths=None)
    assert settled.reason.endswith("and rows of assumed lengths")


def two_stages_measured(slow: float) -> Calibration:
    """Return what an engine of two stages would measure if the machine were so many times as slow as its profile."""
    node, model = two_gpus(bus_bytes_per_s=1e15), small_model()
    stages = stage_configs(
        node,
        StageTimes(node, model, Parallelism(pipeline=2, tensor=1)),
        PipeMaxOptions(estimator_bias=slow - 1),
    )
    return Calibration(device=node.gpu.name, model="model", measured="in a test", stages=stages)


def test_what_engines_measured_here_before_corrects_the_profile(checkpoint: Path, tmp_path: Path) -> None:
    model, kept = tmp_path / "model", tmp_path / "cache" / "pipemax" / "calibrations"
    model.mkdir()
    kept.mkdir(parents=True)
    (checkpoint / "config.json").rename(model / "config.json")
    fast, environ = two_gpus(bus_bytes_per_s=1e15), {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    by_profile = settle(model, node=fast, environ=environ)
    save_calibration(kept / "model--1.yaml", two_stages_measured(2.0))
    corrected = settle(model, node=fast, environ=environ)
    assert corrected.reason.endswith(
        "by the profile of small corrected by the calibration of tp 1 × pp 2 (decode steps take 2.01× the profile's "
        "time, prompts 2.00×) and sampled rows"
    )
    simulated = [float(one.reason.split()[8].replace(",", "")) for one in (by_profile, corrected)]
    assert simulated[0] / simulated[1] == pytest.approx(2.0, rel=0.05)


def test_a_calibration_that_the_config_names_fixes_the_layout_it_was_measured_in(
    checkpoint: Path, tmp_path: Path
) -> None:
    fast, file = two_gpus(bus_bytes_per_s=1e15), tmp_path / "two_stages.yaml"
    save_calibration(file, two_stages_measured(1.0))
    assert parts_of(settle(checkpoint, node=fast).config) == (1, 2, 1)
    assert parts_of(settle(checkpoint, node=fast, calibration=str(file)).config) == (1, 1, 2)


def test_a_pooling_task_gets_a_replica_of_the_whole_model_for_each_engine_s_gpus(checkpoint: Path) -> None:
    gpus = [f"GPU-{number}" for number in range(4)]
    settled = settle(checkpoint, gpus=gpus, task="embed")
    assert parts_of(settled.config) == (4, 1, 1)
    assert "task embed is not simulated" in settled.reason
    assert parts_of(settle(checkpoint, gpus=gpus, task="embed", tensor_parallel_size=2).config) == (2, 2, 1)
