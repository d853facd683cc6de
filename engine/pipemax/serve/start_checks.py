"""Check an engine's start, as far as its config and the checkpoint's files allow, without loading anything.

vLLM would also refuse everything that is refused here, but minutes later. Facts that only a started engine knows are
left to it.
"""

import json
import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipemax.checkpoint.model_kinds import has_windows, refusal_under_pipemax
from pipemax.config import EngineConfig, Policy
from pipemax.domain.units import GIB
from pipemax.node.host_pool_size import host_pool_bytes, kv_bytes_per_token
from pipemax.vllm_ext.seam.model_registry import is_text_only, unknown_architecture

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_WEIGHTS = {
    "*.safetensors": "model.safetensors.index.json",
    "*.bin": "pytorch_model.bin.index.json",
    "*.pt": "",
}
"""Files with weights, the preferred kind first, and the file that lists those of a checkpoint in several."""
_PLAIN_MODELS = ("llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe")
"""Model types whose KV cache grows by the same bytes with each token of each layer."""
_PLAIN_UNDER_PIPEMAX = (
    *("gemma2", "gemma3_text", "gpt_oss", "ministral", "llama4_text", "cohere2", "olmo3", "exaone4"),
)
"""Model types of which the same holds under policy pipemax, if it keeps the whole KV of windowed layers."""
_OTHER_MODEL = ("config_format", "hf_overrides", "model_impl")
"""vLLM's own arguments that change which code runs the model."""
_OTHER_KV = (
    *_OTHER_MODEL,
    "disable_hybrid_kv_cache_manager",
    "max_model_len",
    "kv_cache_dtype_skip_layers",
    "pipeline_parallel_size",
    "tensor_parallel_size",
    "decode_context_parallel_size",
    "prefill_context_parallel_size",
)
"""vLLM's own arguments that change how much KV a token or a request has."""
_CPU_KV_VARIABLE = "VLLM_CPU_KVCACHE_SPACE"
"""vLLM's variable that overrides the KV cache's size on a CPU, GiB."""


def check_start(
    config: EngineConfig,
    model_config: "PreTrainedConfig",
    *,
    num_stages: int,
    has_gpus: bool,
    max_model_len: int,
) -> None:
    """Raise ``ValueError``, with the remedy, for an engine that cannot start."""
    if find_spec("vllm") is None:
        raise ValueError(
            "the engine's environment has no vLLM: name one that has it (--engine-python, requirements/gpu.lock)"
        )
    _check_architecture(config, model_config)
    _check_policy(config, model_config)
    if "load_format" not in config.vllm_arguments and Path(config.model).is_dir():
        _check_weights(Path(config.model))
    if _is_plain(model_config, config) and not any(name in config.vllm_arguments for name in _OTHER_KV):
        token_bytes = kv_bytes_per_token(config, model_config, num_stages=num_stages)
        if token_bytes is not None:
            _check_blocks(config, max_model_len)
            for name, room_bytes in _kv_rooms(config, has_gpus=has_gpus):
                _check_room(name, room_bytes, token_bytes, max_model_len)


def check_images(config: EngineConfig, model_config: "PreTrainedConfig") -> None:
    """Raise ``ValueError`` for an engine that cannot take the images of a job's rows."""
    if config.policy is Policy.PIPEMAX or config.vllm_arguments.get("language_model_only"):
        raise ValueError(
            "the rows have images, and the engine config loads the text part of a model only: set policy: vllm, and "
            "leave language_model_only out"
        )
    architectures = list(getattr(model_config, "architectures", None) or [])
    if is_text_only(architectures) and not any(name in config.vllm_arguments for name in _OTHER_MODEL):
        raise ValueError(
            f"the rows have images, and model {config.model!r} ({architectures[0]}) takes text only: name a model with "
            "image input"
        )


def _check_architecture(config: EngineConfig, model_config: "PreTrainedConfig") -> None:
    architectures = list(getattr(model_config, "architectures", None) or [])
    unknown = unknown_architecture(architectures)
    if unknown is None or any(name in config.vllm_arguments for name in _OTHER_MODEL):
        return
    if getattr(model_config, "auto_map", None) or getattr(model_config, "speculators_config", None):
        return  # its code comes with the checkpoint, or it names another model that vLLM runs in its place
    import transformers

    if not hasattr(transformers, unknown):  # vLLM runs some models by transformers' own code
        raise ValueError(
            f"model {config.model!r} has the architecture {unknown}, which the engine environment's vLLM does not "
            "have: name another model, or an engine environment (--engine-python) whose vLLM has this one"
        )


def _check_policy(config: EngineConfig, model_config: "PreTrainedConfig") -> None:
    """Refuse at once what policy pipemax would refuse when it starts an engine; policy auto takes stock vLLM there."""
    if config.policy is not Policy.PIPEMAX or "hf_overrides" in config.vllm_arguments:
        return
    refusal = refusal_under_pipemax(model_config)
    if refusal is not None:
        raise ValueError(
            f"policy pipemax cannot serve {config.model!r}: it {refusal}. Use policy: vllm, or auto, which takes "
            "stock vLLM for it"
        )


def _check_weights(directory: Path) -> None:
    for pattern, index in _WEIGHTS.items():
        files = sorted(directory.glob(pattern))
        if not files:
            continue
        has_index = bool(index) and (directory / index).is_file()
        if has_index and not any(file.name.startswith("consolidated") for file in files):
            _check_index(directory / index)
        for file in files:
            if pattern == "*.safetensors" and _is_cut_off(file):
                raise ValueError(f"weights {str(file)!r} are cut off or broken: copy the file again")
        return
    raise ValueError(
        f"model directory {str(directory)!r} holds no weights ({', '.join(_WEIGHTS)}): complete the checkpoint"
    )


def _check_index(index: Path) -> None:
    named = sorted(set(_json_object(index.read_bytes(), index)["weight_map"].values()))
    missing = [name for name in named if not (index.parent / name).is_file()]
    if missing:
        raise ValueError(
            f"model directory {str(index.parent)!r} lacks {len(missing)} of the {len(named)} files that {index.name} "
            f"lists, {missing[0]} among them: complete the checkpoint"
        )


def _is_cut_off(file: Path) -> bool:
    """Tell whether a file of safetensors is shorter than its header says: an interrupted copy."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        header_bytes = int.from_bytes(stream.read(8), "little")
        if header_bytes == 0 or 8 + header_bytes > size:
            return True
        header = _json_object(stream.read(header_bytes), file)
    ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    return size < 8 + header_bytes + max(ends, default=0)


def _json_object(text: bytes, file: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(text))
    except ValueError as error:
        raise ValueError(f"{str(file)!r} cannot be read: {error}; copy the file again") from error


def _is_plain(model_config: "PreTrainedConfig", config: EngineConfig) -> bool:
    text_config = model_config.get_text_config()
    if config.policy is Policy.PIPEMAX and (config.enable_prefix_caching or not has_windows(model_config)):
        return text_config.model_type in (*_PLAIN_MODELS, *_PLAIN_UNDER_PIPEMAX)
    layers = getattr(text_config, "layer_types", None) or []
    windowed = getattr(text_config, "sliding_window", None) and getattr(
        text_config, "use_sliding_window", True
    )
    return (
        text_config.model_type in _PLAIN_MODELS
        and not windowed
        and all(kind == "full_attention" for kind in layers)
    )


def _check_blocks(config: EngineConfig, max_model_len: int) -> None:
    blocks = config.vllm_arguments.get("num_gpu_blocks_override")
    if blocks is None or config.block_size is None:
        return
    room_tokens = (int(blocks) - 1) * config.block_size  # vLLM keeps one block for itself
    if room_tokens < max_model_len:
        raise ValueError(
            f"num_gpu_blocks_override {blocks} holds the KV of {room_tokens} tokens, and one request may have "
            f"max_model_len {max_model_len}: raise num_gpu_blocks_override or lower max_model_len"
        )


def _kv_rooms(config: EngineConfig, *, has_gpus: bool) -> Iterator[tuple[str, float]]:
    """Yield each KV memory of a stage whose size the config sets: the setting with its value, and the bytes."""
    if config.vllm_arguments.get("num_gpu_blocks_override") is not None:
        pass  # it goes before any size in bytes
    elif (kv_bytes := config.vllm_arguments.get("kv_cache_memory_bytes")) is not None:
        yield f"kv_cache_memory_bytes {kv_bytes}", float(kv_bytes)
    elif not has_gpus and _CPU_KV_VARIABLE not in os.environ:
        yield f"cpu_kv_gib {config.cpu_kv_gib:g}", config.cpu_kv_gib * GIB
    if config.policy is Policy.PIPEMAX and config.host_kv_gib is not None:
        host_bytes = host_pool_bytes(config, num_workers=1, has_gpus=has_gpus)
        yield f"host_kv_gib {config.host_kv_gib:g}", host_bytes


def _check_room(name: str, room_bytes: float, token_bytes: int, max_model_len: int) -> None:
    room_tokens = int(room_bytes / token_bytes)
    if room_tokens < max_model_len:
        raise ValueError(
            f"{name} holds the KV of {room_tokens} tokens on a stage, and one request of max_model_len {max_model_len} "
            f"needs {max_model_len * token_bytes / GIB:.3g} GiB: raise {name.partition(' ')[0]}, lower max_model_len, "
            "or raise pipeline_parallel_size"
        )
