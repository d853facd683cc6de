"""Reads which layers of a model are unlike its others: dense ones among experts, and recurrent ones.

The names are those of Hugging Face's configurations. A family whose recurrent layers are not described here is refused
by the setting that says so.
"""

from typing import Any

from pipemax.checkpoint.model_kinds import state_setting
from pipemax.domain.layer_kinds import DenseLayers, RecurrentLayers

_STATES_IN_32_BITS = ("float32", "float")
_CONVOLUTION = 4
"""Tokens of the short convolution before a recurrent mixer, where the configuration does not say."""


def dense_layers(text: Any, num_layers: int, *, ffn_size: int | None) -> DenseLayers | None:
    """Return the layers without experts of a model with experts; ``None`` if all have them.

    ``ffn_size`` is that of a dense layer, as far as the configuration says it.
    """
    layers = tuple(layer for layer in range(num_layers) if not _has_experts(text, layer))
    if not layers:
        return None
    if ffn_size is None:
        raise ValueError("it has layers without experts, and its configuration gives no intermediate_size")
    return DenseLayers(layers=layers, ffn_size=ffn_size)


def _has_experts(text: Any, layer: int) -> bool:
    kinds = getattr(text, "mlp_layer_types", None)
    if isinstance(kinds, list) and layer < len(kinds):
        return bool(kinds[layer] == "sparse")
    chosen = getattr(text, "moe_layers", None)
    if isinstance(chosen, list) and chosen:
        return layer in chosen
    frequency = getattr(text, "moe_layer_freq", None)
    if isinstance(frequency, list):
        return bool(frequency[layer])
    first = max(
        _number(text, name) for name in ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index")
    )
    if layer < first or layer in (getattr(text, "mlp_only_layers", None) or ()):
        return False
    if isinstance(period := getattr(text, "expert_layer_period", None), int):
        return layer % period == _number(text, "expert_layer_offset")
    every = next(
        (
            value
            for name in (
                "moe_layer_freq",
                "decoder_sparse_step",
                "interleave_moe_layer_step",
                "moe_layer_interval",
            )
            if (value := _number(text, name))
        ),
        1,
    )
    is_counted_from_0 = hasattr(
        text, "moe_layer_freq"
    )  # DeepSeek's layers, of which none is left out in practice
    return (layer if is_counted_from_0 else layer + 1) % every == 0


def recurrent_layers(text: Any, num_layers: int, *, hidden: int) -> RecurrentLayers | None:
    """Return the layers with a state in place of KV. Raise ``ValueError`` for a family that is not described here."""
    setting = state_setting(text)
    if setting is None:
        return None
    layers = _recurrent_numbers(text, num_layers)
    if not 0 < len(layers) < num_layers:
        raise ValueError(
            f"which of its layers are recurrent is not known ({setting}), or none has attention next to them"
        )
    params, values, conv_values = _mixer(text, hidden, setting)
    state_bytes = values * (4 if _has_wide_states(text) else 2) + conv_values * 2
    return RecurrentLayers(layers=layers, params=params, state_bytes=float(state_bytes))


def _recurrent_numbers(text: Any, num_layers: int) -> tuple[int, ...]:
    """Return the numbers of the recurrent layers; none if the configuration does not say."""
    kinds = next(
        (
            list(kinds)
            for name in ("layer_types", "layers_block_type", "attn_type_list", "block_types")
            if (kinds := getattr(text, name, None))
        ),
        None,
    )
    if kinds is not None:
        attention = ("attention", "full_attention", "full", "hybrid_attention", 1)
        return tuple(layer for layer, kind in enumerate(kinds[:num_layers]) if kind not in attention)
    if settings := getattr(text, "linear_attn_config", None):
        return tuple(layer - 1 for layer in settings.get("kda_layers", ()))
    if full := getattr(text, "full_attn_idxs", None) or getattr(text, "attn_layer_indices", None):
        return tuple(layer for layer in range(num_layers) if layer not in full)
    if isinstance(period := getattr(text, "attn_layer_period", None), int):
        offset = _number(text, "attn_layer_offset")
        return tuple(layer for layer in range(num_layers) if layer % period != offset)
    return ()


def _mixer(text: Any, hidden: int, setting: str) -> tuple[int, int, int]:
    """Return a recurrent mixer's parameters, the values of its state, and those of its convolution's state."""
    if _number(text, "linear_num_value_heads"):
        return _delta_net(text, hidden)
    if settings := getattr(text, "linear_attn_config", None):
        return _kimi_delta(settings, hidden)
    if _number(text, "conv_L_cache"):
        length = _number(text, "conv_L_cache")
        return 4 * hidden * hidden + hidden * length, 0, hidden * (length - 1)
    if getattr(text, "attn_type_list", None) or str(text.model_type).startswith("minimax"):
        heads = _number(text, "num_attention_heads")
        size = _number(text, "head_dim") or hidden // heads
        return 5 * hidden * heads * size, heads * size * size, 0
    heads = _number(text, "mamba_n_heads") or _number(text, "mamba_num_heads")
    if heads:
        return _mamba2(text, hidden, heads)
    if _number(text, "mamba_d_state") and _number(text, "mamba_expand"):
        return _mamba1(text, hidden)
    raise ValueError(f"the recurrent layers of model_type {text.model_type!r} are not described ({setting})")


def _delta_net(text: Any, hidden: int) -> tuple[int, int, int]:
    """Return those of gated delta nets (Qwen3-Next, Qwen3.5)."""
    key_heads, value_heads = _number(text, "linear_num_key_heads"), _number(text, "linear_num_value_heads")
    key_size, value_size = _number(text, "linear_key_head_dim"), _number(text, "linear_value_head_dim")
    keys, values = key_heads * key_size, value_heads * value_size
    length = _number(text, "linear_conv_kernel_dim") or _CONVOLUTION
    params = (
        hidden * (2 * keys + 2 * values + 2 * value_heads) + values * hidden + (2 * keys + values) * length
    )
    return params, value_heads * key_size * value_size, (2 * keys + values) * (length - 1)


def _kimi_delta(settings: dict[str, Any], hidden: int) -> tuple[int, int, int]:
    """Return those of Kimi's delta attention."""
    heads, size = int(settings["num_heads"]), int(settings["head_dim"])
    inner, length = heads * size, int(settings.get("short_conv_kernel_size", _CONVOLUTION))
    gates = 2 * (hidden * size + size * inner) + hidden * heads
    return 4 * hidden * inner + gates + 3 * inner * length, heads * size * size, 3 * inner * (length - 1)


def _mamba2(text: Any, hidden: int, heads: int) -> tuple[int, int, int]:
    """Return those of Mamba 2 (Bamba, Granite 4)."""
    size = _number(text, "mamba_d_head") or _number(text, "mamba_head_dim")
    inner = heads * size if size else _number(text, "mamba_expand") * hidden
    state = _number(text, "mamba_d_state") or _number(text, "ssm_state_size")
    groups = _number(text, "mamba_n_groups") or _number(text, "n_groups") or 1
    length = _number(text, "mamba_d_conv") or _CONVOLUTION
    convolved = inner + 2 * groups * state
    params = hidden * (inner + convolved + heads) + inner * hidden + convolved * length
    return params, inner * state, convolved * (length - 1)


def _mamba1(text: Any, hidden: int) -> tuple[int, int, int]:
    """Return those of Mamba 1 (Jamba)."""
    inner, state = _number(text, "mamba_expand") * hidden, _number(text, "mamba_d_state")
    rank = _number(text, "mamba_dt_rank") or -(-hidden // 16)
    length = _number(text, "mamba_d_conv") or _CONVOLUTION
    params = 3 * hidden * inner + inner * (rank + 2 * state) + rank * inner + inner * (length + state)
    return params, inner * state, inner * (length - 1)


def _has_wide_states(text: Any) -> bool:
    """Tell whether states have 32 bits: where the configuration says so, and in Kimi's delta attention."""
    return getattr(text, "mamba_ssm_dtype", None) in _STATES_IN_32_BITS or bool(
        getattr(text, "linear_attn_config", None)
    )


def _number(text: Any, name: str) -> int:
    value = getattr(text, name, None)
    return value if isinstance(value, int) else 0
