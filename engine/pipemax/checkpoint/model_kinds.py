"""Tell from a checkpoint's configuration which kind of attention a model has, and whether PipeMax can move its KV.

The names are those of Hugging Face's configurations. Nothing of vLLM is imported: a job asks this before any engine
starts. What a configuration does not say is found by vLLM when the engine starts (``pipemax.vllm_ext.compat``).
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from pipemax.checkpoint.config_json import JsonConfig

    AnyConfig = PreTrainedConfig | JsonConfig

_STATE_SETTINGS = (
    *("state_size", "mamba_d_state", "mamba_state_dim", "ssm_cfg", "ssm_state_size"),
    *("linear_num_value_heads", "linear_attn_config", "lru_width", "conv_L_cache", "attn_type_list"),
)
"""Settings that only models with recurrent layers have: Mamba, linear attention, short convolutions."""
_STATE_MODELS = ("mamba", "rwkv", "recurrent_gemma", "lfm2", "minimax_text")
"""Beginnings of model types of which the same holds."""
_STATE_LAYERS = ("linear_attention", "lightning", "mamba", "mamba2", "hybrid", "conv", "recurrent", "rglru")
_SIZES_BY_LAYER = ("block_configs", "ffn_multipliers", "hybrid_override_pattern")
_LAYER_SETTINGS = ("layer_types", "layers_block_type", "block_types")
_WINDOWS = ("sliding_attention", "chunked_attention")


def state_setting(model_config: "AnyConfig") -> str | None:
    """Return the setting by which a model has layers without KV that grows by tokens; ``None`` if it has none."""
    text = model_config.get_text_config()
    for name in _STATE_SETTINGS:
        if getattr(text, name, None):
            return name
    for name in _LAYER_SETTINGS:
        kinds = [kind for kind in getattr(text, name, None) or () if kind in _STATE_LAYERS]
        if kinds:
            return f"{name}: {kinds[0]}"
    if str(text.model_type).startswith(_STATE_MODELS):
        return f"model_type: {text.model_type}"
    return None


def has_latent_attention(model_config: "AnyConfig") -> bool:
    """Tell whether a token's KV is one latent vector for all heads (MLA)."""
    return bool(getattr(model_config.get_text_config(), "kv_lora_rank", None))


def has_windows(model_config: "AnyConfig") -> bool:
    """Tell whether some layers attend only to a window or a chunk of the tokens."""
    text: Any = model_config.get_text_config()
    kinds = getattr(text, "layer_types", None)
    if kinds:
        return any(kind in _WINDOWS for kind in kinds)
    is_used = getattr(text, "use_sliding_window", True)
    return bool(getattr(text, "sliding_window", None) and is_used)


def window_and_full_layers(model_config: "AnyConfig", num_layers: int) -> tuple[int, tuple[int, ...]] | None:
    """Return the tokens of the sliding window, whose older KV stock vLLM frees, and the layers without one.

    None if no layer has such a window.
    """
    text: Any = model_config.get_text_config()
    window_tokens = getattr(text, "sliding_window", None)
    kinds = getattr(text, "layer_types", None)
    windowed = {layer for layer, kind in enumerate(kinds or ()) if kind == "sliding_attention"}
    if not kinds and has_windows(model_config):
        windowed = set(range(num_layers))
    full = tuple(layer for layer in range(num_layers) if layer not in windowed)
    return (window_tokens, full) if window_tokens and len(full) < num_layers else None


def refusal_under_pipemax(model_config: "AnyConfig") -> str | None:
    """Return why policy pipemax cannot run the model, as the end of "it …"; ``None`` if nothing speaks against it."""
    text = model_config.get_text_config()
    setting = state_setting(model_config)
    if setting is not None:
        return (
            f"has Mamba or linear-attention layers ({setting}), whose state does not grow with the tokens, so "
            "PipeMax cannot keep it in host memory in blocks"
        )
    if getattr(text, "index_topk", None):
        return "has sparse latent attention (index_topk), whose index has a cache of another shape"
    return unlike_layers(model_config)


def unlike_layers(model_config: "AnyConfig") -> str | None:
    """Return why a model is no decoder of layers with equal KV, as the end of "it …"; ``None`` if it is one."""
    text = model_config.get_text_config()
    if getattr(model_config, "is_encoder_decoder", False):
        return "is an encoder-decoder"
    for name in _SIZES_BY_LAYER:
        if getattr(text, name, None):
            return f"has layers of different sizes ({name})"
    if getattr(text, "num_kv_shared_layers", None):
        return "has layers that share the KV of others (num_kv_shared_layers)"
    unlike = _different_kv(text)
    if unlike is not None:
        return f"has layers whose KV differs in size ({unlike})"
    return None


def _different_kv(text: "AnyConfig") -> str | None:
    """Return the setting by which layers have KV of different sizes."""
    settings = text.to_dict()
    full_head_dim = settings.get("global_head_dim")
    if full_head_dim and full_head_dim != settings.get("head_dim"):
        return f"global_head_dim {full_head_dim}"
    for layer in (settings.get("per_layer_config") or {}).values():
        for name in ("head_dim", "num_key_value_heads"):
            if layer.get(name, settings.get(name)) != settings.get(name):
                return f"per_layer_config: {name} {layer[name]}"
    return None
