"""The trial's engines have few layers of the user's model and random weights, and move KV as the user's engine does."""

from pathlib import Path
from typing import Any

import pytest
from transformers import Gemma3Config, GptOssConfig, LlamaConfig, PreTrainedConfig, Qwen3Config

from pipemax.config import EngineConfig, Policy
from pipemax.vllm_ext.launch.known_calibration import block_tables
from pipemax.vllm_ext.launch.vllm_config import launch_environment, make_vllm_config
from pipemax.vllm_ext.node_check.trial_config import cut_overrides, trial_configs

SHAPES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 512,
}


def user_config(directory: Path, model: PreTrainedConfig, **fields: Any) -> EngineConfig:
    """An engine of a checkpoint of which there is only the configuration."""
    model.save_pretrained(directory)
    given = {"model": str(directory), "policy": "pipemax", "pipeline_parallel_size": 2, "max_model_len": 1024}
    return EngineConfig.parse(given | fields)


def llama(num_layers: int) -> LlamaConfig:
    return LlamaConfig(architectures=["LlamaForCausalLM"], num_hidden_layers=num_layers, **SHAPES)


def vllm_config_of(config: EngineConfig) -> Any:
    with launch_environment(config):
        return make_vllm_config(config)


def test_both_engines_have_four_layers_and_the_users_way_of_moving_kv(tmp_path: Path) -> None:
    config = user_config(tmp_path, llama(12), block_size=32, num_batches=3, dtype="bfloat16")
    trial = trial_configs(config, vllm_config_of(config))
    assert (trial.stock.policy, trial.pipemax.policy) == (Policy.VLLM, Policy.PIPEMAX)
    for engine in (trial.stock, trial.pipemax):
        made = vllm_config_of(engine)
        assert made.model_config.get_total_num_hidden_layers() == trial.num_layers == 4
        assert made.load_config.load_format == "pipemax_random"
        assert made.parallel_config.pipeline_parallel_size == 2
        assert made.cache_config.block_size == 32
    assert trial.pipemax.num_batches == 3


@pytest.mark.parametrize(("of_model", "num_stages", "left"), [(12, 6, 6), (3, 2, 3)])
def test_each_stage_has_a_layer_and_a_model_of_fewer_layers_keeps_them(
    tmp_path: Path, of_model: int, num_stages: int, left: int
) -> None:
    config = user_config(tmp_path, llama(of_model), pipeline_parallel_size=num_stages)
    assert trial_configs(config, vllm_config_of(config)).num_layers == left


def test_windows_that_are_freed_are_freed_in_the_trial_too(tmp_path: Path) -> None:
    kinds = (["sliding_attention"] * 5 + ["full_attention"]) * 2
    model = Qwen3Config(
        architectures=["Qwen3ForCausalLM"],
        num_hidden_layers=12,
        layer_types=kinds,
        sliding_window=64,
        use_sliding_window=True,
        **SHAPES,
    )
    freed = {"disable_hybrid_kv_cache_manager": False}
    config = user_config(tmp_path, model, enable_prefix_caching=False, vllm=freed)
    vllm_config = vllm_config_of(config)
    made = vllm_config_of(trial_configs(config, vllm_config).pipemax)
    assert made.model_config.hf_config.layer_types == kinds[2:6]
    assert block_tables(made).window > 0


def test_each_kind_of_layer_is_left() -> None:
    kinds = ["sliding_attention", "full_attention"] * 6
    cut = cut_overrides(GptOssConfig(num_hidden_layers=12, layer_types=kinds), 4)
    assert cut == {"num_hidden_layers": 4, "layer_types": kinds[:4]}


def test_the_text_part_of_a_multimodal_model_is_cut_within_its_own_section() -> None:
    cut = cut_overrides(Gemma3Config(text_config={"num_hidden_layers": 12}), 4)
    assert set(cut) == {"text_config"}
    assert cut["text_config"]["num_hidden_layers"] == 4
    assert set(cut["text_config"]["layer_types"]) == {"sliding_attention", "full_attention"}


def test_quantized_weights_are_left_out(tmp_path: Path) -> None:
    model = llama(8)
    model.quantization_config = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    config = user_config(tmp_path, model)
    vllm_config = vllm_config_of(config)
    assert vllm_config.model_config.quantization == "fp8"
    made = vllm_config_of(trial_configs(config, vllm_config).stock)
    assert made.model_config.quantization is None


def test_a_model_with_code_of_its_own_cannot_be_cut() -> None:
    own = llama(8)
    own.auto_map = {"AutoModelForCausalLM": "modeling_own.Own"}
    with pytest.raises(ValueError, match="brings code of its own"):
        cut_overrides(own, 4)


def test_a_model_that_does_not_name_its_layers_cannot_be_cut() -> None:
    with pytest.raises(ValueError, match="no num_hidden_layers"):
        cut_overrides(PreTrainedConfig(), 4)
