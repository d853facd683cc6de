"""What stock vLLM is started for: the formula on GPUs for sampled rows, the user's own values, and one more start."""

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from pipemax.config import EngineConfig
from pipemax.domain.envelope import StartEnvelope
from pipemax.domain.errors import EngineStartError
from pipemax.domain.specs import NodeSpec
from pipemax.domain.step_records import StepLimits
from pipemax.presets import load_node
from pipemax.vllm_ext.launch import start as start_module
from pipemax.vllm_ext.launch import start_envelope as module
from pipemax.vllm_ext.launch.start import RunningVllm
from pipemax.vllm_ext.launch.start_envelope import (
    envelope_arguments,
    start_envelope,
    with_fitting_rows,
)
from tests.unit.vllm_ext.launch.demo_config import DEMO_MODEL

SHORT = {"prompt_tokens": [40], "max_tokens": 256, "mean_output_tokens": 128.0}
LONG_PROMPTS = {"prompt_tokens": [900], "max_tokens": 8, "mean_output_tokens": 2.0}
NO_ROOM = (
    "model 'x' could not be loaded: ValueError: max_num_seqs (1024) exceeds available Mamba cache blocks (617). "
    "Each decode sequence requires one Mamba cache block, so CUDA graph capture cannot proceed"
)
"""In vLLM's words."""


def config(**values: object) -> EngineConfig:
    base = {"model": DEMO_MODEL, "policy": "vllm", "max_model_len": 1024, "row_lengths": SHORT}
    return EngineConfig.parse(base | values)


class GpuPlatform:
    """vLLM's platform as far as it is asked."""

    @staticmethod
    def is_cpu() -> bool:
        return False

    @staticmethod
    def is_device_capability_family(family: int) -> bool:
        return False


class OfflineDefaults:
    """vLLM's defaults for a GPU like this one."""

    @staticmethod
    def get_batch_defaults(world_size: int) -> tuple[dict[Any, int], dict[Any, int]]:
        context = module.UsageContext.LLM_CLASS
        return {context: 8_192}, {context: 256}


@pytest.fixture
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[Mapping[str, str], Sequence[str]], NodeSpec]:
    """One L20, of which this machine has none."""
    monkeypatch.setattr(module, "current_platform", GpuPlatform)
    monkeypatch.setattr(module, "EngineArgs", OfflineDefaults)
    monkeypatch.setattr(module, "engine_gpus", lambda environ: ["GPU-0"])
    return lambda environ, gpus: load_node("l20x8")


DescribeMachine = Callable[[Mapping[str, str], Sequence[str]], NodeSpec]


def arguments(describe: DescribeMachine, **values: object) -> dict[str, Any]:
    own = config(**values)
    return envelope_arguments(own, start_envelope(own, describe_machine=describe))


def test_short_rows_start_vllm_for_more_of_them_and_say_what_that_costs(
    one_gpu: DescribeMachine, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="pipemax"):
        values = arguments(one_gpu)
    assert values.keys() == {"max_num_seqs", "cudagraph_capture_sizes"}
    assert values["max_num_seqs"] == 4_096
    assert values["cudagraph_capture_sizes"][-1] == 1_024
    assert "up to 8,192 tokens and 4,096 rows (begins with 8,192 and 256)" in caplog.text
    assert "GB of each GPU" in caplog.text


def test_long_prompts_start_vllm_for_longer_steps(one_gpu: DescribeMachine) -> None:
    assert arguments(one_gpu, row_lengths=LONG_PROMPTS)["max_num_batched_tokens"] == 16_384


@pytest.mark.parametrize(
    ("values", "absent"),
    [
        ({"max_num_seqs": 64}, "max_num_seqs"),
        ({"vllm_speed": {"max_num_seqs": 64}}, "max_num_seqs"),
        ({"max_num_batched_tokens": 512}, "max_num_batched_tokens"),
        ({"vllm": {"compilation_config": {"mode": 0}}}, "cudagraph_capture_sizes"),
        ({"vllm_speed": {"cudagraph_capture_sizes": [1, 2]}}, "cudagraph_capture_sizes"),
        ({"enforce_eager": True}, "cudagraph_capture_sizes"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_the_user_sets_is_not_overwritten(
    values: dict[str, object], absent: str, one_gpu: DescribeMachine
) -> None:
    for row_lengths in (SHORT, LONG_PROMPTS):
        own = config(**{"row_lengths": row_lengths} | values)
        envelope = start_envelope(own, describe_machine=one_gpu)
        assert envelope is not None
        assert absent not in envelope_arguments(own, envelope)
        rows, tokens = own.vllm_argument("max_num_seqs"), own.vllm_argument("max_num_batched_tokens")
        assert rows is None or envelope.ceiling.running_rows == envelope.begin.running_rows == rows
        assert tokens is None or envelope.ceiling.step_tokens == envelope.begin.step_tokens == tokens


@pytest.mark.parametrize(
    "values",
    [
        {"row_lengths": None},
        {"vllm_speed": {"performance_mode": "throughput"}},
        {"vllm": {"enable_chunked_prefill": False}},
        {"vllm": {"kv_cache_memory_bytes": 1 << 30}},
    ],
    ids=lambda value: str(value)[:40],
)
def test_without_sampled_rows_or_where_the_user_decides_vllm_s_default_stays(
    values: dict[str, object], one_gpu: DescribeMachine
) -> None:
    assert arguments(one_gpu, **values) == {}


def test_a_machine_without_known_figures_keeps_vllm_s_default_and_says_why(
    one_gpu: DescribeMachine, caplog: pytest.LogCaptureFixture
) -> None:
    def unknown(environ: Mapping[str, str], gpus: Sequence[str]) -> NodeSpec:
        raise ValueError("the rates of a Foo are not known")

    with caplog.at_level(logging.INFO, logger="pipemax"):
        assert start_envelope(config(), describe_machine=unknown) is None
    assert "the rates of a Foo are not known" in caplog.text


def test_on_a_cpu_nothing_changes() -> None:
    assert start_envelope(config()) is None


def test_policy_pipemax_has_no_envelope(one_gpu: DescribeMachine) -> None:
    assert start_envelope(config(policy="pipemax"), describe_machine=one_gpu) is None


def test_an_engine_begins_with_vllm_s_default_within_its_envelope(one_gpu: DescribeMachine) -> None:
    envelope = start_envelope(config(), describe_machine=one_gpu)
    assert envelope is not None
    assert envelope.begin == StepLimits(step_tokens=8_192, running_rows=256)


def test_a_start_with_more_rows_than_mamba_blocks_is_made_once_more_with_as_many() -> None:
    fewer = with_fitting_rows(config(vllm_speed={"max_num_seqs": 1024}), NO_ROOM)
    assert fewer is not None
    assert fewer.vllm_argument("max_num_seqs") == 617
    assert with_fitting_rows(config(), "ValueError: no GPU memory is left") is None
    assert with_fitting_rows(config(), NO_ROOM.replace("617", "0")) is None


def test_the_second_start_s_failure_is_told_and_there_is_no_third() -> None:
    rows: list[object] = []

    def fail(config: EngineConfig, envelope: object, stat_loggers: object) -> Any:
        rows.append(config.vllm_argument("max_num_seqs"))
        blocks = 617 - len(rows)
        raise ValueError(f"max_num_seqs (1024) exceeds available Mamba cache blocks ({blocks}). Each …")

    with pytest.raises(EngineStartError, match=r"Mamba cache blocks \(615\)"):
        RunningVllm.start(config(), load=fail)
    assert rows == [None, 616]


def test_the_machine_is_read_once_for_both_starts_and_for_the_limits_that_the_engine_begins_with(
    one_gpu: DescribeMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine that was started once more still begins with vLLM's default."""
    num_reads = 0
    started: list[tuple[int | None, StepLimits]] = []

    def read(environ: Mapping[str, str], gpus: Sequence[str]) -> NodeSpec:
        nonlocal num_reads
        num_reads += 1
        return one_gpu(environ, gpus)

    def load(config: EngineConfig, envelope: StartEnvelope | None, stat_loggers: object) -> Any:
        assert envelope is not None
        arguments = envelope_arguments(config, envelope)
        started.append((arguments["max_num_seqs"], envelope.begin))
        assert max(arguments["cudagraph_capture_sizes"]) <= arguments["max_num_seqs"]
        if len(started) == 1:
            raise ValueError(NO_ROOM)
        return SimpleNamespace(), SimpleNamespace()

    monkeypatch.setattr(start_module, "start_envelope", partial(start_envelope, describe_machine=read))
    monkeypatch.setattr(start_module, "watch_core", lambda engine, closed: None)
    running = RunningVllm.start(config(), load=load)
    begin = StepLimits(step_tokens=8_192, running_rows=256)
    assert started == [(4_096, begin), (617, begin)]
    assert running.envelope is not None
    assert running.envelope.begin == begin
    assert num_reads == 1
    running.failures.close()
