"""EngineConfig: what a user's YAML may say, and how it is told when it is wrong."""

import re
from pathlib import Path

import pytest

from pipemax.config import EngineConfig, moved_line


def test_the_model_alone_is_enough() -> None:
    config = EngineConfig.parse({"model": "org/name"})
    assert config.max_model_len is None
    assert config.tensor_degree == 1
    assert config.trust_remote_code is False


def test_equal_configs_have_equal_ids_and_different_ones_do_not() -> None:
    one = EngineConfig.parse({"model": "org/name", "vllm": {"a": 1, "b": 2}})
    same = EngineConfig.parse({"vllm": {"b": 2, "a": 1}, "model": "org/name"})
    other = EngineConfig.parse({"model": "org/name", "max_model_len": 128})
    assert one.engine_id() == same.engine_id()
    assert one.engine_id() != other.engine_id()


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"model": " "}, "model"),
        ({}, "'model' is missing"),
        (
            {"model": "m", "max_modle_len": 5},
            "unknown field 'max_modle_len'. Did you mean 'max_model_len'? Known fields: batching, block_size",
        ),
        (
            {"model": "m", "images": {"max_byte": 5}},
            "unknown field 'images.max_byte'. Did you mean 'max_bytes'? Known fields: allow_urls, directories",
        ),
        ({"model": "m", "pipeline_parallel_size": 0}, "pipeline_parallel_size"),
        ({"model": "m", "replicas": 0}, "replicas"),
        ({"model": "m", "gpu_memory_utilization": 1.5}, "got 1.5"),
        ({"model": "m", "policy": "fastest"}, "got 'fastest'"),
        (
            {"model": "m", "kv_cache_dtype": "fp4"},
            "kv_cache_dtype: Input should be 'auto', 'fp8', 'fp8_e4m3' or",
        ),
    ],
)
def test_a_wrong_value_is_named(values: dict[str, object], told: str) -> None:
    with pytest.raises(ValueError, match=re.escape(told)):
        EngineConfig.parse(values)


def test_a_yaml_file_is_read_and_overrides_win(tmp_path: Path) -> None:
    file = tmp_path / "engine.yaml"
    file.write_text("model: org/name\nmax_model_len: 512\n")
    config = EngineConfig.load(file, max_model_len=256)
    assert (config.model, config.max_model_len) == ("org/name", 256)


@pytest.mark.parametrize("text", ["- a\n- b\n", "model: [", "modell: x\n", None])
def test_a_missing_or_broken_yaml_file_is_named(tmp_path: Path, text: str | None) -> None:
    file = tmp_path / "engine.yaml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ValueError, match=r"engine\.yaml"):
        EngineConfig.load(file)


def test_a_hub_token_is_refused_and_not_repeated() -> None:
    with pytest.raises(ValueError, match="set the variable HF_TOKEN for the executors") as refused:
        EngineConfig.parse({"model": "m", "vllm": {"hf_token": "hf_secret"}})
    assert "hf_secret" not in str(refused.value)


def test_names_under_vllm_that_only_change_speed_are_moved_and_told() -> None:
    values = {
        "model": "m",
        "vllm": {"max_num_seqs": 4, "load_format": "dummy"},
        "vllm_speed": {"watermark": 0.1},
    }
    config = EngineConfig.parse(values)
    assert config.vllm == {"load_format": "dummy"}
    assert config.vllm_speed == {"watermark": 0.1, "max_num_seqs": 4}
    assert (moved_line(values) or "").startswith("engine config: max_num_seqs under vllm change no answer")
    assert EngineConfig.parse(config.model_dump()) == config
    assert moved_line(config.model_dump()) is None


def test_a_file_with_such_names_warns_once_per_reading(tmp_path: Path) -> None:
    path = tmp_path / "engine.yaml"
    path.write_text("model: m\nvllm: {max_num_seqs: 4}\n")
    with pytest.warns(UserWarning, match="max_num_seqs under vllm") as told:
        EngineConfig.load(path)
    assert len(told) == 1


@pytest.mark.parametrize("name", ["quantization", "dtype", "hf_overrides", "speculative_config", "hf_token"])
def test_what_changes_answers_is_refused_under_vllm_speed(name: str) -> None:
    with pytest.raises(ValueError, match=f"vllm_speed: Value error, {name} may change answers") as refused:
        EngineConfig.parse({"model": "m", "vllm_speed": {name: "secret-value"}})
    assert "secret-value" not in str(refused.value)


def test_an_argument_has_one_place() -> None:
    with pytest.raises(ValueError, match="max_num_seqs stands under vllm and under vllm_speed"):
        EngineConfig.parse({"model": "m", "vllm": {"max_num_seqs": 4}, "vllm_speed": {"max_num_seqs": 5}})


@pytest.mark.parametrize("place", ["vllm", "vllm_speed"])
@pytest.mark.parametrize(
    "arguments", [{"kv_transfer_config": {"kv_connector": "LMCacheConnectorV1"}}, {"kv_offloading_size": 4}]
)
def test_a_kv_connector_of_the_user_s_is_refused_where_pipemax_needs_that_place(
    arguments: dict[str, object], place: str
) -> None:
    (name,) = arguments
    with pytest.raises(ValueError, match=rf"{name} names another: leave it out, or set policy: vllm"):
        EngineConfig.parse({"model": "m", "policy": "pipemax", place: arguments})
    for policy in ("vllm", "auto"):
        assert (
            EngineConfig.parse({"model": "m", "policy": policy, place: arguments}).vllm_arguments == arguments
        )


LENGTHS = {"prompt_tokens": [100], "max_tokens": 50}


@pytest.mark.parametrize(
    ("values", "frees"),
    [
        ({}, False),
        ({"row_lengths": LENGTHS}, False),
        ({"enable_prefix_caching": False}, False),
        ({"enable_prefix_caching": False, "row_lengths": LENGTHS}, None),
        ({"vllm": {"disable_hybrid_kv_cache_manager": False}}, True),
        (
            {
                "enable_prefix_caching": False,
                "row_lengths": LENGTHS,
                "vllm": {"disable_hybrid_kv_cache_manager": True},
            },
            False,
        ),
    ],
)
def test_windows_are_freed_where_rows_share_nothing_and_the_lengths_say_that_it_pays(
    values: dict[str, object], frees: bool | None
) -> None:
    assert EngineConfig.parse({"model": "m", **values}).frees_windows is frees
