"""Derive the engine configs of the trial of tokens: the user's engine with few layers, random weights, small pools.

Nothing of the checkpoint is read but its configuration. What decides how KV is moved stays as the user has it: stages,
tensor parallelism, batches, block size, types. Quantized weights and adapters are left out, because
both sides compute with the same weights.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pipemax.config import EngineConfig
from pipemax.domain.units import GIB
from pipemax.vllm_ext.node_check import random_weights
from pipemax.vllm_ext.seam.vllm_types import VllmConfig, current_platform

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_FEWEST_LAYERS = 4
_MAX_MODEL_LEN = 512
_KV_GIB = 1.0
"""Of each pool."""
_STOCK_SEQS = 64
_LEFT_OUT = (
    *("hf_overrides", "model_loader_extra_config", "quantization", "speculative_config"),
    *("kv_cache_memory_bytes", "num_gpu_blocks_override"),
)
"""Arguments of vLLM's that speak of the checkpoint's weights and layers, or of the pools' sizes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialConfigs:
    """The two engines of the trial."""

    stock: EngineConfig
    pipemax: EngineConfig
    num_layers: int


def trial_configs(config: EngineConfig, vllm_config: VllmConfig) -> TrialConfigs:
    """Return the trial's configs for the user's engine under PipeMax. ``ValueError`` if its model cannot be cut."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    if config.vllm_arguments.get("hf_overrides"):
        raise ValueError("the engine config has hf_overrides of its own")
    wanted = max(_FEWEST_LAYERS, parallel.pipeline_parallel_size)
    num_layers = min(wanted, model.get_total_num_hidden_layers())
    overrides = cut_overrides(model.hf_config, num_layers)
    max_model_len = min(_MAX_MODEL_LEN, model.max_model_len)
    arguments = {name: value for name, value in config.vllm_arguments.items() if name not in _LEFT_OUT}
    arguments |= {
        "hf_overrides": overrides,
        "load_format": random_weights.LOAD_FORMAT,
        "worker_extension_cls": f"{random_weights.__name__}.{random_weights.KnowsRandomWeights.__name__}",
        "skip_tokenizer_init": True,
        "language_model_only": True,
    }
    changes: dict[str, Any] = {
        "quantization": None,
        "lora": {},
        "calibration": None,
        "calibrate_at_start_s": 0.0,
        "check_at_start": False,
        "max_model_len": max_model_len,
        "pipeline_parallel_size": parallel.pipeline_parallel_size,
        "host_kv_gib": _KV_GIB,
    }
    if current_platform.is_cpu():
        # There are no batch-invariant kernels for CPUs, and in float32 none are needed.
        changes |= {"dtype": "float32", "cpu_kv_gib": min(config.cpu_kv_gib, _KV_GIB)}
    else:
        arguments |= {"kv_cache_memory_bytes": int(_KV_GIB * GIB)}
        if not config.enforce_eager:
            # CUDA graphs as the engine has them, without the minutes of compiling.
            arguments.setdefault("compilation_config", {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"})
    # Prompts in pieces, in batches that differ from PipeMax's.
    steps = {"max_num_seqs": _STOCK_SEQS, "max_num_batched_tokens": max_model_len}
    values = config.model_dump() | changes | {"vllm": arguments, "vllm_speed": {}}
    return TrialConfigs(
        stock=EngineConfig.parse(values | steps | {"policy": "vllm"}),
        pipemax=EngineConfig.parse(values | {"policy": "pipemax"}),
        num_layers=num_layers,
    )


def cut_overrides(hf_config: "PreTrainedConfig", num_layers: int) -> dict[str, Any]:
    """Return vLLM's ``hf_overrides`` that leave a model so many layers, each kind of layer among them, unquantized.

    ``ValueError`` if the configuration does not tell how.
    """
    if getattr(hf_config, "auto_map", None):
        raise ValueError("the checkpoint brings code of its own (auto_map)")
    text: Any = hf_config.get_text_config()
    all_layers = getattr(text, "num_hidden_layers", None)
    if not isinstance(all_layers, int):
        raise ValueError("its configuration has no num_hidden_layers")
    per_layer = {
        name: list(value)
        for name, value in text.to_dict().items()
        if isinstance(value, list | tuple) and len(value) == all_layers
    }
    kinds = per_layer.get("layer_types", [])
    # Through the first layer of the kind that comes last: of five layers with a window and one without, the last four.
    end = max([num_layers, *(kinds.index(kind) + 1 for kind in set(kinds))])
    cut: dict[str, Any] = {"num_hidden_layers": num_layers}
    cut |= {name: values[end - num_layers : end] for name, values in per_layer.items()}
    nested = {} if text is hf_config else {_name_of(text, hf_config): cut}
    unquantized = {"quantization_config": None} if getattr(hf_config, "quantization_config", None) else {}
    return (nested or cut) | unquantized


def _name_of(text: Any, hf_config: "PreTrainedConfig") -> str:
    for name, value in vars(hf_config).items():
        if value is text:
            return name
    raise ValueError("its configuration has the text model's part deeper than one level")
