"""Reads a model's shapes from its checkpoint's configuration, as the profile that the simulator needs.

The names are those of Hugging Face's configurations, read by transformers or as JSON (``config_json``). What has no
such shapes (layers of different sizes, encoders) is refused, as is a quantization whose bits are not known: a wrong
profile would choose a wrong layout. Layers that attend to chunks (Llama 4), and sparse latent attention, count as full
attention. Of a multimodal model only the text part counts.
"""

from typing import TYPE_CHECKING, Any

from pipemax.checkpoint.layer_shapes import dense_layers, recurrent_layers
from pipemax.checkpoint.model_kinds import unlike_layers, window_and_full_layers
from pipemax.checkpoint.quantization import QuantizedWeights, quantized_weights
from pipemax.domain.hardware import WeightDtype
from pipemax.domain.layer_kinds import DenseLayers
from pipemax.domain.specs import KvCacheDtype, ModelSpec

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from pipemax.checkpoint.config_json import JsonConfig

_TYPE_BYTES = {"float32": 4, "float": 4, "bfloat16": 2, "float16": 2, "half": 2, "auto": 2}
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_HIDDEN = ("hidden_size", "n_embd", "d_model")
_HEADS = ("num_attention_heads", "n_head", "n_heads")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num")
_FFN = ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size")
_VOCABULARY = ("vocab_size", "padded_vocab_size")
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_EXPERTS_PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k")
_SHARED_EXPERTS = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")
_SHARED_SIZES = ("shared_expert_intermediate_size", "shared_intermediate_size")
_UNGATED = (
    *("gpt2", "gpt_bigcode", "gpt_neox", "gptj", "opt", "bloom", "mpt", "falcon", "phi", "starcoder2"),
    *("nemotron", "persimmon"),
)
"""Model types whose feed-forward part has two matrices, of four times the hidden size unless the file says another."""
_GATED_QUERIES = ("qwen3_next", "qwen3_5")
"""Beginnings of model types whose attention has a gate as large as its queries."""


def model_shapes(
    name: str,
    model_config: "PreTrainedConfig | JsonConfig",
    *,
    dtype: str,
    kv_cache_dtype: KvCacheDtype = KvCacheDtype.AUTO,
) -> ModelSpec:
    """Return the profile of a decoder. Raise ``ValueError`` for a model that such a profile cannot describe.

    ``dtype`` is the engine config's: ``auto`` counts as 16 bits, in which vLLM runs 32-bit checkpoints.
    """
    text = model_config.get_text_config()
    try:
        spec = _shapes(name, model_config, text, dtype)
    except ValueError as error:
        raise ValueError(f"the shapes of model {name!r} are not known: {error}") from None
    return spec.with_kv_dtype(kv_cache_dtype)


def _shapes(name: str, model_config: Any, text: Any, dtype: str) -> ModelSpec:
    if (unlike := unlike_layers(model_config)) is not None:
        raise ValueError(f"it {unlike}")
    value_bytes = _TYPE_BYTES.get(dtype)
    if value_bytes is None:
        raise ValueError(f"the bytes of dtype {dtype!r} are not known")
    num_layers, hidden, heads = (_needed(text, names) for names in (_LAYERS, _HIDDEN, _HEADS))
    recurrent = recurrent_layers(text, num_layers, hidden=hidden)
    window_tokens, full_layers = window_and_full_layers(model_config, num_layers) or (None, ())
    if recurrent is not None and window_tokens is not None:
        raise ValueError("it has layers with windows (sliding_window) next to recurrent ones")
    quantization = getattr(model_config, "quantization_config", None) or getattr(
        text, "quantization_config", None
    )
    return ModelSpec(
        name=name,
        num_layers=num_layers,
        hidden_size=hidden,
        num_heads=heads,
        **_attention(text, heads=heads, hidden=hidden),
        **_feed_forward(text, num_layers, hidden=hidden),
        vocab_size=_needed(text, _VOCABULARY),
        bytes_per_value=value_bytes,
        **_weights(quantized_weights(quantization, num_layers)),
        window_tokens=window_tokens,
        full_layers=full_layers,
        recurrent=recurrent,
        has_tied_embeddings=bool(getattr(text, "tie_word_embeddings", False)),
    )


def _attention(text: Any, *, heads: int, hidden: int) -> dict[str, Any]:
    """Return the part of a profile that says what attention keeps and computes."""
    latent = _first(text, ("kv_lora_rank",))
    if latent is not None:
        return _latent_attention(text, latent, heads=heads, hidden=hidden)
    head_dim = _first(text, ("head_dim", "attention_head_dim")) or hidden // heads
    kv_heads = 1 if getattr(text, "multi_query", False) else _first(text, _KV_HEADS) or heads
    attention: dict[str, Any] = {"num_kv_heads": kv_heads, "head_dim": head_dim}
    is_gated = getattr(text, "attn_output_gate", str(text.model_type).startswith(_GATED_QUERIES))
    if is_gated:
        attention["attention_params"] = hidden * head_dim * (3 * heads + 2 * kv_heads)
    return attention


def _latent_attention(text: Any, latent: int, *, heads: int, hidden: int) -> dict[str, Any]:
    nope, rope, value = (
        _needed(text, (setting,)) for setting in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    )
    query_rank = _first(text, ("q_lora_rank",))
    queries = heads * (nope + rope)
    params = hidden * queries if query_rank is None else query_rank * (hidden + queries)
    params += hidden * (latent + rope) + latent * heads * (nope + value) + heads * value * hidden
    index_values = 0
    if _first(text, ("index_topk",)) is not None:  # keys of the index, a byte each, and their scale
        index_heads, index_dim = (_needed(text, (one,)) for one in ("index_n_heads", "index_head_dim"))
        params += (query_rank or hidden) * index_heads * index_dim + hidden * (index_dim + index_heads)
        index_values = (index_dim + 4) // 2
    return {
        "num_kv_heads": 1,
        "head_dim": (nope + rope + value) // 2,
        "latent_size": latent + rope + index_values,
        "attention_params": params,
    }


def _feed_forward(text: Any, num_layers: int, *, hidden: int) -> dict[str, Any]:
    """Return the part of a profile that says what experts, or the feed-forward part of a dense model, compute."""
    is_ungated = text.model_type in _UNGATED
    usual = _first(text, _FFN) or (4 * hidden if is_ungated else None)
    shared_size = _first(text, _SHARED_SIZES)
    num_experts = _first(text, _EXPERTS) or 1
    if num_experts == 1:
        size = shared_size if str(text.model_type).startswith("granitemoe") else usual
        if size is None:
            raise ValueError(f"its configuration gives no {_FFN[0]}")
        return {
            "ffn_size": size,
            "num_experts": 1,
            "experts_per_token": 1,
            "ffn_matrices": 2 if is_ungated else 3,
        }
    size = _first(text, ("moe_intermediate_size",)) or usual
    per_token = _first(text, _EXPERTS_PER_TOKEN)
    if size is None or per_token is None:
        missing = "moe_intermediate_size" if size is None else _EXPERTS_PER_TOKEN[0]
        raise ValueError(f"its configuration gives no {missing}")
    num_shared = _first(text, _SHARED_EXPERTS) or (round(shared_size / size) if shared_size else 0)
    if str(text.model_type).startswith("llama4"):
        num_shared = 1
    dense: DenseLayers | None = dense_layers(
        text, num_layers, ffn_size=_first(text, ("intermediate_size_mlp",)) or usual
    )
    return {
        "ffn_size": size,
        "num_experts": num_experts + num_shared,
        "experts_per_token": min(per_token, num_experts) + num_shared,
        "dense": dense,
    }


def _weights(quantized: QuantizedWeights | None) -> dict[str, Any]:
    """Return the part of a profile that says in what weights are kept and multiplied."""
    if quantized is None:
        return {}
    return {
        "expert_bytes_per_value": quantized.value_bytes if quantized.has_experts else None,
        "attention_bytes_per_value": quantized.value_bytes if quantized.has_attention else None,
        "weight_dtype": quantized.dtype if quantized.has_experts else WeightDtype.BF16,
    }


def _first(config: Any, names: tuple[str, ...]) -> int | None:
    return next(
        (value for name in names if isinstance(value := getattr(config, name, None), int) and value), None
    )


def _needed(config: Any, names: tuple[str, ...]) -> int:
    value = _first(config, names)
    if value is None:
        raise ValueError(f"its configuration gives no {names[0]}")
    return value
