"""Start vLLM's engine core over a virtual node, stock vLLM or PipeMax: in this process, or make its config."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from vllm.config import VllmConfig
from vllm.envs import disable_envs_cache
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine.core import EngineCore

from lab.virtual_node.executor import VirtualNodeExecutor
from lab.virtual_node.settings import ClockSettings, RehearsalSettings
from pipemax.config import EngineConfig, Policy
from pipemax.domain.plan import Batching
from pipemax.domain.specs import (
    KvCacheDtype,
    KvCapacity,
    ModelSpec,
    NodeSpec,
    Parallelism,
    block_layers,
    kv_capacity,
)
from pipemax.sim.machine import BLOCK_TOKENS
from pipemax.sim.stage_times import StageTimes
from pipemax.sim.systems.pipemax_config import PipeMaxOptions, stage_configs
from pipemax.vllm_ext.compat import check_model
from pipemax.vllm_ext.launch.vllm_config import default_num_batches, engine_args, fit_scheduler
from pipemax.vllm_ext.runtime_settings import RuntimeSettings
from pipemax.vllm_ext.seam.version import check_version


@dataclass(frozen=True, slots=True, kw_only=True)
class RehearsedEngine:
    """An engine on a node that is not there."""

    node: NodeSpec
    model: ModelSpec
    parallelism: Parallelism
    policy: Policy
    """``pipemax`` or ``vllm``."""
    chunk_tokens: int
    """Maximum number of tokens in one step (``max_num_batched_tokens``)."""
    max_model_len: int
    max_num_seqs: int = 4096
    """Maximum number of requests in one step, or running at once under stock vLLM."""
    batching: Batching = Batching.SEPARATED
    """Under ``pipemax``."""
    num_batches: int | None = None
    """Decode batches in rotation under ``pipemax``; None for as many as steps can be in flight, at least 2."""
    clock: ClockSettings = field(default_factory=ClockSettings)
    checks_kv: bool = True
    """Check that steps and copies find the KV that they should; takes time, but none of the clock's."""
    controller: dict[str, Any] = field(default_factory=dict)
    """Fields of ``ControllerConfig`` that differ from their defaults."""
    assumed_node: NodeSpec | None = None
    """The node whose step times and links the controller expects; None for this one."""
    vllm: dict[str, Any] = field(default_factory=dict)
    """Further arguments of vLLM's ``EngineArgs``."""
    executor: type[VirtualNodeExecutor] = VirtualNodeExecutor
    """Tests put faulty ones here."""

    @property
    def frees_windows(self) -> bool:
        """Whether vLLM's hybrid KV cache manager frees the KV that has left the windows of the model's layers."""
        if self.model.window_tokens is None:
            return False
        if self.policy is Policy.PIPEMAX:
            return self.vllm.get("disable_hybrid_kv_cache_manager") is False
        return not self.vllm.keys() & {"disable_hybrid_kv_cache_manager", "kv_transfer_config"}

    @property
    def capacity(self) -> KvCapacity:
        return kv_capacity(
            self.node,
            self.model,
            self.parallelism,
            block_tokens=BLOCK_TOKENS,
            frees_windows=self.frees_windows,
        )


@contextmanager
def rehearsed_core(engine: RehearsedEngine) -> Iterator[EngineCore]:
    """Start a core, and end it on exit. ``ValueError`` if the engine cannot run on its node.

    Meanwhile, vLLM takes this process's environment to be that of its V2 model runner.
    """
    with TemporaryDirectory(prefix="pipemax-rehearsal-") as directory:
        write_model_config(engine.model, Path(directory), max_model_len=engine.max_model_len)
        vllm_config = rehearsed_config(engine, {"model": directory}, {"skip_tokenizer_init": True})
        with _v2_model_runner():
            core = EngineCore(vllm_config, engine.executor, log_stats=False)
            try:
                yield core
            finally:
                core.shutdown()  # type: ignore[no-untyped-call]  # vLLM's


def write_model_config(model: ModelSpec, directory: Path, *, max_model_len: int) -> None:
    """Write a checkpoint's ``config.json`` with the model's shapes: Llama's architecture, or Mixtral's for experts."""
    values: dict[str, Any] = {
        "hidden_size": model.hidden_size,
        "intermediate_size": model.ffn_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "vocab_size": model.vocab_size,
        "max_position_embeddings": max_model_len,
        "dtype": _dtype(model.bytes_per_value),
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    if model.num_experts == 1:
        values |= {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    else:
        values |= {
            "architectures": ["MixtralForCausalLM"],
            "model_type": "mixtral",
            "num_local_experts": model.num_experts,
            "num_experts_per_tok": model.experts_per_token,
            "sliding_window": None,
        }
    (directory / "config.json").write_text(json.dumps(values), encoding="utf-8")


def _dtype(value_bytes: int) -> str:
    """Return vLLM's type for weights and activations; it has none of one byte for both."""
    match value_bytes:
        case 2:
            return "bfloat16"
        case 4:
            return "float32"
        case _:
            raise ValueError(f"a rehearsed model has 2 or 4 bytes a value of weights, not {value_bytes}")


def _kv_cache_dtype(model: ModelSpec) -> str:
    if model.kv_value_bytes == model.bytes_per_value:
        return KvCacheDtype.AUTO
    return KvCacheDtype.FP8 if model.kv_value_bytes == 1 else _dtype(model.kv_value_bytes)


def rehearsed_config(
    engine: RehearsedEngine, settings: dict[str, Any], vllm_settings: dict[str, Any] | None = None
) -> VllmConfig:
    """Make vLLM's config. ``ValueError`` if the engine cannot run on its node.

    ``settings`` are further ones of ``EngineConfig``, among them ``model``, a directory with the ``config.json`` of
    ``write_model_config``; ``vllm_settings`` are those of vLLM's ``EngineArgs``.
    """
    virtual = RehearsalSettings(
        node=engine.node,
        model=engine.model,
        clock=engine.clock,
        checks_kv=engine.checks_kv,
    )
    config = EngineConfig.parse(
        {
            "policy": engine.policy,
            "pipeline_parallel_size": engine.parallelism.pipeline,
            "tensor_parallel_size": engine.parallelism.tensor,
            "max_model_len": engine.max_model_len,
            # vLLM refuses more requests in a step than tokens, though under pipelining those are in several steps.
            "max_num_seqs": min(engine.max_num_seqs, engine.chunk_tokens),
            "max_num_batched_tokens": engine.chunk_tokens,
            "block_size": BLOCK_TOKENS,
            "enable_prefix_caching": not (engine.frees_windows and engine.policy is Policy.PIPEMAX),
            "vllm": {
                "kv_cache_dtype": _kv_cache_dtype(engine.model),
                "num_gpu_blocks_override": engine.capacity.gpu_blocks,
                "distributed_executor_backend": engine.executor,
                "enable_chunked_prefill": True,
                "async_scheduling": True,
                "additional_config": virtual.to_additional_config(),
                **engine.vllm,
                **(vllm_settings or {}),
            },
            **settings,
        }
    )
    vllm_config = engine_args(config).create_engine_config(UsageContext.LLM_CLASS)
    # vLLM's platform of CPUs turned both off.
    vllm_config.scheduler_config.async_scheduling = True
    if engine.frees_windows:  # not known to vLLM, since the checkpoint's config has no windows
        vllm_config.scheduler_config.disable_hybrid_kv_cache_manager = False
    if engine.policy is Policy.PIPEMAX:
        check_version()
        check_model(vllm_config)
        with _v2_model_runner():
            runtime = _runtime_settings(engine, vllm_config)
            # The number of blocks is given, but a GPU's engine would not know it when it decides on its slots.
            node = engine.node
            gpu_bytes = node.gpu.memory_bytes * node.gpu_memory_fraction
            fit_scheduler(vllm_config, runtime, gpu_bytes=gpu_bytes)
        assert vllm_config.kv_transfer_config is not None
        vllm_config.kv_transfer_config.kv_connector_extra_config.update(runtime.to_extra_config())
    return vllm_config


def _runtime_settings(engine: RehearsedEngine, vllm_config: VllmConfig) -> RuntimeSettings:
    """Return what the engine would know on its node, calibrated; its step times are fitted as in the simulator."""
    node = engine.assumed_node or engine.node
    times = StageTimes(node, engine.model, engine.parallelism)
    room_layers = block_layers(engine.model, engine.parallelism, frees_windows=engine.frees_windows)
    stages = stage_configs(node, times, PipeMaxOptions(), room_layers=room_layers)
    return RuntimeSettings(
        host_kv_tokens=engine.capacity.host_blocks * BLOCK_TOKENS,
        num_batches=engine.num_batches or default_num_batches(vllm_config),
        stages=tuple(stages),
        max_num_seqs=min(engine.max_num_seqs, engine.chunk_tokens),
        stores_tokens=True,
        batching=engine.batching,
        controller=engine.controller,
    )


@contextmanager
def _v2_model_runner() -> Iterator[None]:
    """Have vLLM's configs say V2, which without Triton they refuse while they are made."""
    name = "VLLM_USE_V2_MODEL_RUNNER"
    before = os.environ.get(name)
    os.environ[name] = "1"
    disable_envs_cache()  # a core that started before has kept the environment
    try:
        yield
    finally:
        disable_envs_cache()
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
