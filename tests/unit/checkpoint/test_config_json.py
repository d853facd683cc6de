"""Shapes read from config.json as JSON: published parameter counts, types of weights, and what is not described."""

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from pipemax.checkpoint.config_json import JsonConfig, load_config_json
from pipemax.checkpoint.local_files import hub_cache, model_directory, weight_file_bytes
from pipemax.checkpoint.model_shapes import model_shapes
from pipemax.domain.hardware import WeightDtype
from pipemax.domain.layer_kinds import LayerKind, Mixer
from pipemax.domain.specs import ModelSpec, Parallelism, kv_capacity
from pipemax.presets import load_node

CONFIGS = Path(__file__).parents[2] / "fakes" / "model_configs"


def shapes_of(name: str, **changes: Any) -> ModelSpec:
    values = json.loads((CONFIGS / f"{name}.json").read_text()) | changes
    return model_shapes(name, JsonConfig(values), dtype="auto")


@pytest.mark.parametrize(
    ("name", "params", "active"),
    [
        ("glm-4.5-air", 106e9, 12e9),
        ("deepseek-v3", 671e9, 37e9),
        ("deepseek-v3.2", 671e9, 37e9),
        ("qwen3-next-80b-a3b", 80e9, 3e9),
        ("llama-3.1-70b-awq", 70.6e9, 70.6e9),
        ("llama-3.1-8b-gptq", 8.03e9, 8.03e9),
        ("qwen3-30b-a3b-nvfp4", 30.5e9, 3.3e9),
        ("granite-4.0-h-small", 32e9, 9e9),
        ("gemma-3-12b", 11.8e9, 11.8e9),
    ],
)
def test_parameters_are_the_published_ones(name: str, params: float, active: float) -> None:
    """Active parameters are published rounded, with or without the input embedding."""
    model = shapes_of(name)
    assert model.num_params == pytest.approx(params, rel=0.02)
    assert model.active_params == pytest.approx(active, rel=0.2)


@pytest.mark.parametrize(
    ("name", "gigabytes", "dtype"),
    [
        ("deepseek-v3", 673, WeightDtype.FP8),
        ("llama-3.1-70b-awq", 39.8, WeightDtype.BF16),
        ("llama-3.1-8b-gptq", 5.73, WeightDtype.BF16),
        ("qwen3-30b-a3b-nvfp4", 18.1, WeightDtype.FP4),
    ],
)
def test_quantized_checkpoints_have_the_size_of_their_files(
    name: str, gigabytes: float, dtype: WeightDtype
) -> None:
    model = shapes_of(name)
    assert model.weight_bytes == pytest.approx(gigabytes * 1e9, rel=0.02)
    assert model.weight_dtype is dtype


@pytest.mark.parametrize(
    ("ignored", "attention", "experts"),
    [
        (["lm_head", "re:.*self_attn.*"], None, 0.5625),
        (["model.layers.24.self_attn*"], None, 0.5625),
        (["re:.*mlp.experts.*"], 0.5625, None),
        (["lm_head", "re:.*mlp.gate$"], 0.5625, 0.5625),
    ],
)
def test_parts_that_are_left_out_of_a_quantization_keep_16_bits(
    ignored: list[str], attention: float | None, experts: float | None
) -> None:
    settings = json.loads((CONFIGS / "qwen3-30b-a3b-nvfp4.json").read_text())["quantization_config"]
    model = shapes_of("qwen3-30b-a3b-nvfp4", quantization_config=settings | {"ignore": ignored})
    assert (model.attention_bytes_per_value, model.expert_bytes_per_value) == (attention, experts)


def test_a_quantization_in_a_file_of_its_own_counts(tmp_path: Path) -> None:
    values = json.loads((CONFIGS / "qwen3-30b-a3b-nvfp4.json").read_text())
    del values["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(values))
    quantization = {"quantization": {"quant_algo": "NVFP4", "exclude_modules": ["lm_head"]}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(quantization))
    model = model_shapes("x", load_config_json(tmp_path / "config.json"), dtype="auto")
    assert (model.expert_bytes_per_value, model.weight_dtype) == (0.5625, WeightDtype.FP4)


def test_a_hybrid_keeps_kv_in_some_layers_and_a_state_in_the_others() -> None:
    """Qwen3-Next: every fourth of 48 layers attends; a state has 32 × 128 × 128 values."""
    model = shapes_of("qwen3-next-80b-a3b")
    assert model.layer_kinds(0, 48) == {
        LayerKind(Mixer.FULL, False): 12,
        LayerKind(Mixer.RECURRENT, False): 36,
    }
    assert model.kv_bytes_per_token == 12 * 2 * 2 * 256 * 2
    assert model.recurrent is not None
    assert model.recurrent.state_bytes == 2 * (32 * 128 * 128 + 3 * 8192)
    capacity = kv_capacity(load_node("h100x8"), model, Parallelism(pipeline=1, tensor=8))
    block_bytes = 16 * 12 * 2 * 256 * 2  # of one KV head on each GPU
    state_bytes = 36 * model.recurrent.state_bytes / 8
    assert capacity.groups.fixed_blocks == -(-state_bytes // block_bytes)
    assert capacity.gpu_rows(16) < capacity.gpu_blocks / capacity.groups.fixed_blocks


def test_json_and_transformers_give_the_same_shapes() -> None:
    for name, kind in (("glm-4.5-air", "Glm4MoeConfig"), ("qwen3-next-80b-a3b", "Qwen3NextConfig")):
        values = json.loads((CONFIGS / f"{name}.json").read_text())
        config = getattr(transformers, kind)(**values)
        assert model_shapes(name, config, dtype="auto") == shapes_of(name)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": None}, "gives no hidden_size"),
        ({"num_experts_per_tok": None}, "gives no num_experts_per_tok"),
        ({"is_encoder_decoder": True}, "is an encoder-decoder"),
        ({"quantization_config": {"quant_method": "new"}}, "quantized by 'new' are not known"),
        ({"quantization_config": {"quant_method": "compressed-tensors"}}, "config_groups has 0 kinds"),
        ({"block_configs": [{}]}, "layers of different sizes (block_configs)"),
    ],
)
def test_what_is_missing_or_unknown_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match="the shapes of model 'glm-4") as raised:
        shapes_of("glm-4.5-air", **changes)
    assert message in str(raised.value)


def test_what_is_no_configuration_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    with pytest.raises(ValueError, match="there is no file"):
        load_config_json(path)
    path.write_text("{")
    with pytest.raises(ValueError, match=r"config\.json is no JSON"):
        load_config_json(path)
    path.write_text("[]")
    with pytest.raises(ValueError, match="holds no JSON object"):
        load_config_json(path)


def test_hugging_face_s_cache_is_where_its_libraries_look(tmp_path: Path) -> None:
    assert hub_cache({"HF_HUB_CACHE": "/a"}) == Path("/a")
    assert hub_cache({"HF_HOME": "/b"}) == Path("/b/hub")
    assert hub_cache({"XDG_CACHE_HOME": "/c"}) == Path("/c/huggingface/hub")
    snapshot = tmp_path / "models--a--b" / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    environ = {"HF_HUB_CACHE": str(tmp_path)}
    assert model_directory("a/b", environ=environ) is None
    assert model_directory("a/b", revision="0123", environ=environ) == snapshot
    assert weight_file_bytes(snapshot) is None
    (snapshot / "model-1.safetensors").write_bytes(b"123")
    (snapshot / "model-2.safetensors").write_bytes(b"45")
    (snapshot / "pytorch_model.bin").write_bytes(b"12345")
    assert weight_file_bytes(snapshot) == 5
