"""Reads a model's shapes from its checkpoint's configuration, as the profile that the simulator needs.

The names are those of Hugging Face's configurations. What has no such shapes (state-space layers, latent attention,
encoders) is refused, as is a quantization whose bits are not known: a wrong profile would choose a wrong layout.
"""

from typing import TYPE_CHECKING, Any

from pipemax.domain.specs import KvCacheDtype, ModelSpec

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_TYPE_BYTES = {"float32": 4, "float": 4, "bfloat16": 2, "float16": 2, "half": 2, "auto": 2}
_NO_PLAIN_ATTENTION = ("kv_lora_rank", "state_size", "mamba_d_state", "ssm_cfg", "linear_num_value_heads")
"""Settings of models whose KV is not keys and values of heads."""
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
_EXPERTS_PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk")


def model_shapes(
    name: str,
    model_config: "PreTrainedConfig",
    *,
    dtype: str,
    kv_cache_dtype: KvCacheDtype = KvCacheDtype.AUTO,
) -> ModelSpec:
    """Return the profile of a decoder. Raise ``ValueError`` for a model that such a profile cannot describe.

    ``dtype`` is the engine config's: ``auto`` counts as 16 bits, in which vLLM runs 32-bit checkpoints. Quantized
    weights count in feed-forward layers only, where nearly all of them are.
    """
    text = model_config.get_text_config()
    foreign = [setting for setting in _NO_PLAIN_ATTENTION if getattr(text, setting, None)]
    if foreign or getattr(model_config, "is_encoder_decoder", False):
        raise ValueError(
            f"model {name!r} is no decoder with plain attention ({', '.join(foreign) or 'it has an encoder'})"
        )
    num_experts = _first(text, _EXPERTS) or 1
    experts_per_token = _first(text, _EXPERTS_PER_TOKEN) or 1
    heads = _needed(text, "num_attention_heads", name)
    hidden = _needed(text, "hidden_size", name)
    ffn = (_first(text, ("moe_intermediate_size",)) if num_experts > 1 else None) or _needed(
        text, "intermediate_size", name
    )
    value_bytes = _TYPE_BYTES.get(dtype)
    if value_bytes is None:
        raise ValueError(f"the bytes of dtype {dtype!r} are not known")
    spec = ModelSpec(
        name=name,
        num_layers=_needed(text, "num_hidden_layers", name),
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=_first(text, ("num_key_value_heads",)) or heads,
        head_dim=_first(text, ("head_dim",)) or hidden // heads,
        ffn_size=ffn,
        num_experts=num_experts,
        experts_per_token=min(experts_per_token, num_experts),
        vocab_size=_needed(text, "vocab_size", name),
        bytes_per_value=value_bytes,
        expert_bytes_per_value=_quantized_bytes(getattr(model_config, "quantization_config", None)),
    )
    return spec.with_kv_dtype(kv_cache_dtype)


def _first(config: "PreTrainedConfig", names: tuple[str, ...]) -> int | None:
    return next(
        (value for name in names if isinstance(value := getattr(config, name, None), int) and value), None
    )


def _needed(config: "PreTrainedConfig", setting: str, name: str) -> int:
    value = _first(config, (setting,))
    if value is None:
        raise ValueError(f"the configuration of model {name!r} gives no {setting}")
    return value


def _quantized_bytes(quantization: object) -> float | None:
    """Return the bytes of a quantized weight, ``None`` if weights are not quantized."""
    if quantization is None:
        return None
    settings: dict[str, Any] = quantization if isinstance(quantization, dict) else vars(quantization)
    match settings.get("quant_method"):
        case "mxfp4":
            return 4.25 / 8  # a scale of 8 bits for each 32 weights
        case "fp8":
            return 1.0
        case "gptq" | "awq" if isinstance(settings.get("bits"), int):
            return float(settings["bits"]) / 8
        case "compressed-tensors":
            groups = settings.get("config_groups") or {}
            bits = {(group.get("weights") or {}).get("num_bits") for group in groups.values()}
            if len(bits) == 1 and isinstance(only := bits.pop(), int):
                return only / 8
    raise ValueError(f"the bytes of weights quantized by {settings.get('quant_method')!r} are not known")
