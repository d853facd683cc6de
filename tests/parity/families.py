"""Small random models of other architectures than ``make_model``'s Llama, with what is particular about each.

Windows and chunks are far shorter than the prompts, so that layers that attend to less than everything show it.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from transformers import PreTrainedConfig, PreTrainedModel

from tests.parity.make_model import SMALL, VOCABULARY, make_model, make_tokenizer, vary
from tests.parity.quantized import quantize

WINDOW = 48
_IDS = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
_TEXT = {**SMALL, **_IDS, "vocab_size": VOCABULARY, "max_position_embeddings": 2048}
_MIXED_LAYERS = ["sliding_attention", "full_attention"] * 4
_VISION = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}


def _gpt_oss() -> PreTrainedConfig:
    """Windows in every second layer, attention sinks, experts."""
    return transformers.GptOssConfig(
        **{**_TEXT, "intermediate_size": 128},
        architectures=["GptOssForCausalLM"],
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=WINDOW,
        layer_types=_MIXED_LAYERS,
    )


def _gemma3_text() -> PreTrainedConfig:
    """Windows in five of six layers: the second of two stages has one full layer, the first one too."""
    kinds = ["full_attention" if layer in (2, 7) else "sliding_attention" for layer in range(8)]
    return transformers.Gemma3TextConfig(
        **_TEXT,
        architectures=["Gemma3ForCausalLM"],
        sliding_window=WINDOW,
        layer_types=kinds,
        query_pre_attn_scalar=32,
    )


def _mistral() -> PreTrainedConfig:
    """A window in every layer."""
    return transformers.MistralConfig(**_TEXT, architectures=["MistralForCausalLM"], sliding_window=WINDOW)


def _gemma3() -> PreTrainedConfig:
    """Text and images."""
    return transformers.Gemma3Config(
        text_config=_gemma3_text().to_dict(),
        vision_config={**_VISION, "model_type": "siglip_vision_model", "image_size": 28, "patch_size": 14},
        architectures=["Gemma3ForConditionalGeneration"],
        mm_tokens_per_image=4,
        image_token_index=VOCABULARY - 1,
        boi_token_index=VOCABULARY - 2,
        eoi_token_index=VOCABULARY - 3,
        **_IDS,
    )


def _mistral3() -> PreTrainedConfig:
    """Text and images, full attention."""
    return transformers.Mistral3Config(
        text_config={**_TEXT, "model_type": "mistral", "sliding_window": None},
        vision_config={
            **_VISION,
            "model_type": "pixtral",
            "head_dim": 16,
            "image_size": 28,
            "patch_size": 14,
        },
        image_token_index=VOCABULARY - 1,
        architectures=["Mistral3ForConditionalGeneration"],
        spatial_merge_size=2,
        **_IDS,
    )


def _llama4() -> PreTrainedConfig:
    """Text and images, chunked attention in three of four layers, experts."""
    text: dict[str, Any] = {
        **_TEXT,
        "intermediate_size": 128,
        "intermediate_size_mlp": 256,
        "num_local_experts": 4,
        "num_experts_per_tok": 1,
        "interleave_moe_layer_step": 2,
        "attention_chunk_size": 64,
        "no_rope_layers": [1, 1, 1, 0] * 2,
    }
    vision = {
        **_VISION,
        "image_size": 28,
        "patch_size": 14,
        "vision_output_dim": 32,
        "projector_input_dim": 32,
        "projector_output_dim": 32,
    }
    return transformers.Llama4Config(
        architectures=["Llama4ForConditionalGeneration"],
        text_config=text,
        vision_config=vision,
        image_token_index=VOCABULARY - 1,
        **_IDS,
    )


def _deepseek() -> PreTrainedConfig:
    """Latent attention (MLA), of the size for which vLLM's kernel for CPUs is made; experts behind a dense layer.

    Positions are scaled, as in all published models: without that, vLLM's kernel for CPUs turns the wrong values, and
    stock vLLM's own answers depend on which requests are in a step.
    """
    return transformers.DeepseekV3Config(
        **{name: value for name, value in _TEXT.items() if name not in ("head_dim", "num_key_value_heads")},
        num_key_value_heads=8,
        architectures=["DeepseekV3ForCausalLM"],
        kv_lora_rank=512,
        q_lora_rank=64,
        qk_nope_head_dim=32,
        qk_rope_head_dim=64,
        v_head_dim=32,
        moe_intermediate_size=64,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_shared_experts=1,
        first_k_dense_replace=1,
        n_group=1,
        topk_group=1,
        topk_method="noaux_tc",
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 512,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
    )


CONFIGS: dict[str, Callable[[], PreTrainedConfig]] = {
    "gpt-oss": _gpt_oss,
    "gemma3-text": _gemma3_text,
    "mistral": _mistral,
    "gemma3": _gemma3,
    "mistral3": _mistral3,
    "llama4": _llama4,
    "deepseek": _deepseek,
}


MULTIMODAL = ("gemma3", "mistral3", "llama4")


ADAPTERS = ("red", "blue")


def make_adapter(directory: Path, name: str) -> None:
    """Write a LoRA adapter for ``make_model``'s small Llama, in PEFT's format."""
    directory.mkdir()
    rank, hidden = 4, SMALL["hidden_size"]
    generator = torch.Generator().manual_seed(ADAPTERS.index(name) + 1)
    weights: dict[str, torch.Tensor] = {}
    sizes = {
        "q_proj": SMALL["num_attention_heads"] * SMALL["head_dim"],
        "v_proj": SMALL["num_key_value_heads"] * SMALL["head_dim"],
    }
    for layer in range(SMALL["num_hidden_layers"]):
        for projection, size in sizes.items():
            stem = f"base_model.model.model.layers.{layer}.self_attn.{projection}"
            weights[f"{stem}.lora_A.weight"] = torch.randn(rank, hidden, generator=generator) / 16
            weights[f"{stem}.lora_B.weight"] = torch.randn(size, rank, generator=generator) / 16
    save_file(weights, directory / "adapter_model.safetensors")
    settings = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": 16,
        "target_modules": list(sizes),
        "bias": "none",
    }
    (directory / "adapter_config.json").write_text(json.dumps(settings))


def make_family(directory: Path, family: str) -> None:
    """Write a model of the family in float32, and the byte tokenizer.

    ``awq``, ``gptq`` and ``fp8`` are Llamas; vLLM itself quantizes the last one.
    """
    if family in ("llama", "awq", "gptq", "fp8"):
        make_model(directory, SMALL)
        if family in ("awq", "gptq"):
            quantize(directory, family)
        return
    make_tokenizer().save_pretrained(directory)
    torch.manual_seed(0)
    config = CONFIGS[family]()
    auto = (
        transformers.AutoModelForImageTextToText
        if hasattr(config, "vision_config")
        else transformers.AutoModelForCausalLM
    )
    model: PreTrainedModel = auto.from_config(config, dtype=torch.float32)
    vary(model)
    model.save_pretrained(directory)
