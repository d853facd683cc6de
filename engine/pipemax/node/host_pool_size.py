"""Computes how much KV, and how many requests, an engine's host pools hold, before any engine runs."""

from collections.abc import Sequence
from statistics import mean
from typing import TYPE_CHECKING

from pipemax.config import EngineConfig, Policy
from pipemax.domain.units import GIB, ceil_div
from pipemax.transfer.host_memory import available_host_bytes

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

HOST_SHARE = 0.5
"""Share for the pools on a machine with GPUs: nothing else can use pinned pages."""
_CPU_POOLS = 4
_TYPE_BYTES = {
    "float32": 4,
    "float": 4,
    "auto": 2,  # vLLM runs 32-bit checkpoints in 16 bits
    "half": 2,
    "float16": 2,
    "bfloat16": 2,
    "fp8": 1,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
}
"""By vLLM's names of types for activations and KV. Its other KV types keep scales too, or no whole bytes."""


def host_pool_bytes(config: EngineConfig, *, num_workers: int, has_gpus: bool) -> float:
    """Return the bytes of one worker's host pool.

    They are as configured; otherwise, with GPUs, an equal part of what the machine can spare.
    """
    if config.host_kv_gib is not None:
        return config.host_kv_gib * GIB
    if not has_gpus:
        return _CPU_POOLS * config.cpu_kv_gib * GIB
    return HOST_SHARE * available_host_bytes() / num_workers


def expected_rows(
    config: EngineConfig,
    model_config: "PreTrainedConfig",
    *,
    num_stages: int,
    has_gpus: bool,
    row_tokens: Sequence[int],
) -> int | None:
    """Return about how many requests of these lengths (prompt and output, tokens) fit into the engine's host pools.

    This is an estimate from the model's configuration only. None if nothing was sampled, the configuration does not
    give its heads, or the policy is not pipemax: what ``auto`` will choose is not known yet.
    """
    if config.policy is not Policy.PIPEMAX or not row_tokens:
        return None
    token_bytes = kv_bytes_per_token(config, model_config, num_stages=num_stages)
    if token_bytes is None:
        return None
    num_workers = num_stages * config.tensor_degree
    pool_bytes = host_pool_bytes(config, num_workers=num_workers, has_gpus=has_gpus)
    return max(1, int(pool_bytes / token_bytes / mean(row_tokens)))


def kv_bytes_per_token(
    config: EngineConfig, model_config: "PreTrainedConfig", *, num_stages: int
) -> int | None:
    """Return the bytes of KV that the worker with the most layers keeps of a token, if all attention is full or latent.

    ``None`` if the model's configuration does not give its heads, or the KV cache has one of vLLM's other types.
    """
    value_bytes = _value_bytes(config, model_config)
    text_config = model_config.get_text_config()
    layers = getattr(text_config, "num_hidden_layers", None)
    heads = getattr(text_config, "num_attention_heads", None)
    kv_heads = getattr(text_config, "num_key_value_heads", None) or heads
    if not layers or not heads or not kv_heads or value_bytes is None:
        return None
    own_layers = ceil_div(layers, num_stages)
    latent = getattr(text_config, "kv_lora_rank", None)
    if latent:  # one vector for all heads, whole on each GPU that shares a stage
        return int(own_layers * (latent + text_config.qk_rope_head_dim) * value_bytes)
    head_dim = getattr(text_config, "head_dim", None) or text_config.hidden_size // heads
    own_heads = ceil_div(kv_heads, config.tensor_degree)
    return int(2 * own_layers * own_heads * head_dim * value_bytes)


def _value_bytes(config: EngineConfig, model_config: "PreTrainedConfig") -> int | None:
    kv_type = str(config.vllm_argument("kv_cache_dtype"))
    if kv_type != "auto":
        return _TYPE_BYTES.get(kv_type)
    if _says_kv_type(getattr(model_config, "quantization_config", None)):
        return None
    return _TYPE_BYTES.get(str(config.vllm_argument("dtype")))


def _says_kv_type(quantization: object) -> bool:
    """Tell whether a checkpoint's quantization also gives a type for KV, in which vLLM keeps it under ``auto``."""
    if not isinstance(quantization, dict):
        return False
    names = ("kv_cache_scheme", "kv_cache_quant_algo")
    return any(quantization.get(name) for name in names) or _says_kv_type(quantization.get("quantization"))
