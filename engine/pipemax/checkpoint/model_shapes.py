"""Reads a model's shapes from its checkpoint's configuration, as the profile that the simulator needs.

The names are those of Hugging Face's configurations. What has no such shapes (state-space layers, sparse attention,
layers of different sizes, encoders) is refused, as is a quantization whose bits are not known: a wrong profile would
choose a wrong layout. Layers that attend to chunks (Llama 4) count as full attention, whose KV stock vLLM keeps too.
Of a multimodal model only the text part counts, and the first dense layers of a model with experts count as layers with
experts.
"""

from typing import TYPE_CHECKING, Any

from pipemax.checkpoint.model_kinds import refusal_under_pipemax, window_and_full_layers
from pipemax.domain.specs import KvCacheDtype, ModelSpec

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_TYPE_BYTES = {"float32": 4, "float": 4, "bfloat16": 2, "float16": 2, "half": 2, "auto": 2}
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
    refusal = refusal_under_pipemax(model_config)
    if refusal is not None:
        raise ValueError(f"the shapes of model {name!r} are not known: it {refusal}")
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
    num_shared = (_first(text, ("n_shared_experts",)) or 0) if num_experts > 1 else 0
    num_layers = _needed(text, "num_hidden_layers", name)
    window_tokens, full_layers = window_and_full_layers(model_config, num_layers) or (None, ())
    spec = ModelSpec(
        name=name,
        num_layers=num_layers,
        hidden_size=hidden,
        num_heads=heads,
        **_attention(text, name, heads=heads, hidden=hidden),
        ffn_size=ffn,
        num_experts=num_experts + num_shared,
        experts_per_token=min(experts_per_token, num_experts) + num_shared,
        vocab_size=_needed(text, "vocab_size", name),
        bytes_per_value=value_bytes,
        expert_bytes_per_value=_quantized_bytes(getattr(model_config, "quantization_config", None)),
        window_tokens=window_tokens,
        full_layers=full_layers,
    )
    return spec.with_kv_dtype(kv_cache_dtype)


def _attention(text: "PreTrainedConfig", name: str, *, heads: int, hidden: int) -> dict[str, Any]:
    """Return the part of a profile that says what attention keeps and computes."""
    latent = _first(text, ("kv_lora_rank",))
    if latent is None:
        return {
            "num_kv_heads": _first(text, ("num_key_value_heads",)) or heads,
            "head_dim": _first(text, ("head_dim",)) or hidden // heads,
        }
    nope, rope, value = (
        _needed(text, setting, name) for setting in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    )
    query_rank = _first(text, ("q_lora_rank",))
    queries = heads * (nope + rope)
    params = hidden * queries if query_rank is None else query_rank * (hidden + queries)
    params += hidden * (latent + rope) + latent * heads * (nope + value) + heads * value * hidden
    return {
        "num_kv_heads": 1,
        "head_dim": (nope + rope + value) // 2,
        "latent_size": latent + rope,
        "attention_params": params,
    }


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
