"""Shapes read from Hugging Face's own configuration classes, compared with the profiles that ship."""

from dataclasses import replace
from typing import Any

import pytest
from transformers import (
    BambaConfig,
    DeepseekV3Config,
    Gemma3Config,
    Gemma4Config,
    GptOssConfig,
    Llama4Config,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    T5Config,
    Zamba2Config,
)

from pipemax.checkpoint.model_shapes import model_shapes
from pipemax.domain.layer_kinds import LayerKind, Mixer
from pipemax.domain.specs import KvCacheDtype, ModelSpec
from pipemax.presets import load_model


def shapes(config: PreTrainedConfig, **settings: Any) -> ModelSpec:
    return model_shapes("x", config, **{"dtype": "auto", **settings})


@pytest.mark.parametrize(
    ("config", "shipped"),
    [
        (
            LlamaConfig(
                num_hidden_layers=80,
                hidden_size=8192,
                num_attention_heads=64,
                num_key_value_heads=8,
                intermediate_size=28672,
                vocab_size=32000,
            ),
            "llama2-70b",
        ),
        (MixtralConfig(num_key_value_heads=8, vocab_size=32000), "mixtral-8x7b"),
        (
            Qwen3Config(
                num_hidden_layers=36,
                hidden_size=4096,
                num_attention_heads=32,
                num_key_value_heads=8,
                head_dim=128,
                intermediate_size=12288,
                vocab_size=151936,
            ),
            "qwen3-8b",
        ),
        (
            Qwen3MoeConfig(
                num_hidden_layers=94,
                hidden_size=4096,
                num_attention_heads=64,
                num_key_value_heads=4,
                head_dim=128,
                moe_intermediate_size=1536,
                num_experts=128,
                num_experts_per_tok=8,
                vocab_size=151936,
            ),
            "qwen3-235b-a22b",
        ),
        (GptOssConfig(quantization_config={"quant_method": "mxfp4"}), "gpt-oss-120b"),
        (
            Gemma3Config(
                text_config={
                    "num_hidden_layers": 62,
                    "hidden_size": 5376,
                    "num_attention_heads": 32,
                    "num_key_value_heads": 16,
                    "head_dim": 128,
                    "intermediate_size": 21504,
                    "vocab_size": 262208,
                    "sliding_window": 1024,
                }
            ),
            "gemma-3-27b",
        ),
    ],
)
def test_configurations_give_the_profiles_that_ship(config: PreTrainedConfig, shipped: str) -> None:
    assert replace(shapes(config), name=shipped) == load_model(shipped)


def test_a_multimodal_model_has_the_shapes_of_its_text_part() -> None:
    config = Gemma3Config()
    assert shapes(config).num_layers == config.get_text_config().num_hidden_layers


def test_latent_attention_keeps_one_vector_of_a_token_for_all_heads() -> None:
    """DeepSeek V3: 61 layers × (512 + 64) values, of 671 billion parameters with 37 billion active."""
    model = shapes(DeepseekV3Config())
    assert model.kv_bytes_per_token == 61 * 576 * 2
    assert model.kv_shards(8) == 1, "every GPU of a stage keeps the whole vector"
    assert model.weight_bytes / 2 == pytest.approx(671e9, rel=0.002), "its first three layers are dense"
    assert model.active_params == pytest.approx(37e9, rel=0.03)


def test_windows_of_all_layers_and_of_none() -> None:
    mistral = shapes(MistralConfig(sliding_window=4096))
    assert (mistral.window_tokens, mistral.full_layers) == (4096, ())
    assert mistral.layer_kinds(0, 32) == {LayerKind(Mixer.WINDOW, False): 32}
    for config in (
        MistralConfig(sliding_window=None),
        Qwen2Config(sliding_window=4096, use_sliding_window=False),
        Llama4Config(),
    ):
        assert shapes(config).window_tokens is None


def test_the_text_part_of_llama_4_has_its_kv_heads() -> None:
    config = Llama4Config()
    text = config.get_text_config()
    per_layer = 2 * text.num_key_value_heads * text.head_dim * 2
    assert shapes(config).kv_bytes_per_token == text.num_hidden_layers * per_layer


@pytest.mark.parametrize(
    ("quantization", "expected"),
    [
        ({"quant_method": "fp8"}, 1.0),
        ({"quant_method": "gptq", "bits": 4}, 0.5),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, 0.5 + 2.5 / 128),
        ({"quant_method": "awq", "bits": 4}, 0.5),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"group_0": {"weights": {"num_bits": 8}}},
            },
            1.0,
        ),
    ],
)
def test_quantized_weights_have_their_bytes(quantization: dict[str, Any], expected: float) -> None:
    model = shapes(LlamaConfig(quantization_config=quantization))
    assert (model.expert_bytes_per_value, model.attention_bytes_per_value) == (expected, expected)
    assert model.bytes_per_value == 2


def test_types_of_weights_and_of_kv_are_the_engines() -> None:
    assert shapes(LlamaConfig(), dtype="float32").bytes_per_value == 4
    assert shapes(LlamaConfig(), kv_cache_dtype=KvCacheDtype.FP8).kv_value_bytes == 1
    assert shapes(LlamaConfig()).kv_value_bytes == 2


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (BambaConfig(), r"or none has attention next to them"),
        (Zamba2Config(), r"recurrent"),
        (Gemma4Config(), "layers whose KV differs in size"),
        (T5Config(), "is an encoder-decoder"),
        (LlamaConfig(quantization_config={"quant_method": "new"}), "quantized by 'new' are not known"),
    ],
)
def test_what_a_profile_cannot_describe_is_refused(config: PreTrainedConfig, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        shapes(config)
