"""Kinds of models under policy pipemax: what the launch sets for them, and what it refuses before weights load."""

import json
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from transformers import PreTrainedConfig
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec, FullAttentionSpec, SlidingWindowSpec

from pipemax.config import EngineConfig, RowLengths
from pipemax.control.controller_config import StageConfig
from pipemax.control.times.calibration import Calibration
from pipemax.domain.kv_groups import KvGroups
from pipemax.domain.step_times import StepTimeModel
from pipemax.domain.tuned import WAVE_GROUPS
from pipemax.node.host_pool_size import kv_bytes_per_token as expected_kv_bytes
from pipemax.vllm_ext.launch.forecast import forecast, measured_engine, runtime_settings
from pipemax.vllm_ext.launch.known_calibration import kv_bytes_per_token
from pipemax.vllm_ext.launch.vllm_config import make_vllm_config
from pipemax.vllm_ext.worker.whole_windows import with_whole_windows
from tests.parity.families import CONFIGS, WINDOW
from tests.parity.make_model import make_tokenizer
from tests.unit.vllm_ext.launch.demo_config import two_stages

pytestmark = pytest.mark.usefixtures("cache")


DirectoryOf = Callable[[PreTrainedConfig], str]


@pytest.fixture(scope="module")
def directory_of(tmp_path_factory: pytest.TempPathFactory) -> DirectoryOf:
    """Write a checkpoint without weights."""

    def directory_of(model: PreTrainedConfig) -> str:
        directory = tmp_path_factory.mktemp("model")
        make_tokenizer().save_pretrained(directory)
        model.save_pretrained(directory)
        return str(directory)

    return directory_of


def config_of(directory: str, **values: object) -> EngineConfig:
    return two_stages(model=directory, dtype="float32", host_kv_gib=0.25, **values)


def test_windows_are_kept_whole_and_the_log_says_so(
    directory_of: DirectoryOf, caplog: pytest.LogCaptureFixture
) -> None:
    model = CONFIGS["gpt-oss"]()
    config = config_of(directory_of(model))
    with caplog.at_level(logging.INFO, logger="pipemax"):
        vllm_config = make_vllm_config(config)
    assert vllm_config.scheduler_config.disable_hybrid_kv_cache_manager
    assert "keeps the whole KV of the layers" in caplog.text
    assert expected_kv_bytes(config, model, num_stages=2) == max(kv_bytes_per_token(vllm_config))


FREED = {"vllm": {"disable_hybrid_kv_cache_manager": False}, "enable_prefix_caching": False}


def test_what_has_left_windows_is_freed_if_the_config_says_so(
    directory_of: DirectoryOf, caplog: pytest.LogCaptureFixture
) -> None:
    directory = directory_of(CONFIGS["gpt-oss"]())
    whole = make_vllm_config(config_of(directory))
    with caplog.at_level(logging.INFO, logger="pipemax"):
        freed = make_vllm_config(config_of(directory, **FREED))
    assert "frees the KV" in caplog.text
    assert kv_bytes_per_token(freed) == [half // 2 for half in kv_bytes_per_token(whole)], (
        "two of four layers"
    )
    assert runtime_settings(freed).host_kv_tokens == 2 * runtime_settings(whole).host_kv_tokens
    engine = measured_engine(freed, two_equal_stages(), gpu_blocks=101)
    assert engine.stock_capacity == engine.capacity
    assert engine.capacity.groups == KvGroups(full=1, window=1, window_tokens=WINDOW)


def test_waves_need_whole_kv_and_reach_the_simulated_engine(directory_of: DirectoryOf) -> None:
    directory = directory_of(CONFIGS["gpt-oss"]())
    with pytest.raises(ValueError, match="waves: on is not possible here: they need the whole KV"):
        make_vllm_config(config_of(directory, waves="on", **FREED))
    for waves, expected in (("off", None), ("on", WAVE_GROUPS)):
        vllm_config = make_vllm_config(config_of(directory, waves=waves))
        assert measured_engine(vllm_config, two_equal_stages(), gpu_blocks=101).wave_groups == expected


def test_shared_prefixes_are_refused_where_windows_are_freed(directory_of: DirectoryOf) -> None:
    config = config_of(directory_of(CONFIGS["gpt-oss"]()), **FREED | {"enable_prefix_caching": True})
    with pytest.raises(ValueError, match="set enable_prefix_caching: false as well"):
        make_vllm_config(config)


@pytest.mark.parametrize(
    ("tokens", "shares_prefixes", "frees"), [(400, False, True), (400, True, False), (40, False, False)]
)
def test_long_rows_that_share_nothing_have_their_windows_freed(
    directory_of: DirectoryOf, tokens: int, shares_prefixes: bool, frees: bool
) -> None:
    lengths = RowLengths(prompt_tokens=(tokens,), max_tokens=20)
    config = config_of(
        directory_of(CONFIGS["gpt-oss"]()),
        row_lengths=lengths,
        enable_prefix_caching=shares_prefixes,
        block_size=32,
    )
    vllm_config = make_vllm_config(config)
    assert vllm_config.scheduler_config.disable_hybrid_kv_cache_manager is not frees
    assert vllm_config.cache_config.enable_prefix_caching is shares_prefixes


def two_equal_stages() -> Calibration:
    stage = StageConfig(
        kv_bytes_per_token=1000,
        h2d_bytes_per_s=1e9,
        decode_time=StepTimeModel.linear(alpha_s=1e-4, beta_s=0.0, delta_s=1e-3),
        prefill_time=StepTimeModel.linear(alpha_s=1e-4, beta_s=0.0, delta_s=1e-3),
    )
    return Calibration(device="cpu", model="model", measured="in a test", stages=(stage, stage))


@pytest.mark.parametrize(
    ("name", "full", "window", "more"),
    [("gpt-oss", 1, 1, 4 / 2), ("gemma3", 1, 3, 4 / 1), ("mistral", 0, 1, 1), ("llama4", 1, 0, None)],
)
def test_the_simulator_learns_what_stock_vllm_frees_of_windows(
    directory_of: DirectoryOf, name: str, full: int, window: int, more: float | None
) -> None:
    """Eight layers on two stages, in groups of four, two and eight; a block has room for ``4 / more`` of a stage."""
    vllm_config = make_vllm_config(config_of(directory_of(CONFIGS[name]())))
    engine = measured_engine(vllm_config, two_equal_stages(), gpu_blocks=101)
    if more is None:
        assert engine.windowed_capacity is None, "chunks are kept whole under stock vLLM too"
        return
    freed = engine.stock_capacity
    assert (freed.groups.full, freed.groups.window, freed.groups.window_tokens) == (full, window, WINDOW)
    assert (engine.capacity.gpu_blocks, freed.gpu_blocks) == (100, 100 * more)


def test_a_multimodal_checkpoint_runs_its_text_part(
    directory_of: DirectoryOf, caplog: pytest.LogCaptureFixture
) -> None:
    model = CONFIGS["gemma3"]()
    config = config_of(directory_of(model))
    with caplog.at_level(logging.INFO, logger="pipemax"):
        vllm_config = make_vllm_config(config)
    assert vllm_config.model_config.multimodal_config.language_model_only
    assert not vllm_config.model_config.supports_multimodal_inputs, "it would need the processor of images"
    assert "runs the text part" in caplog.text
    assert expected_kv_bytes(config, model, num_stages=2) == max(kv_bytes_per_token(vllm_config))
    with pytest.raises(ValueError, match="language_model_only is off"):
        make_vllm_config(config.model_copy(update={"vllm": {"language_model_only": False}}))


ON_BOTH_CPUS = pytest.mark.parametrize("has_amx", [False, True], indirect=True, ids=["no-amx", "amx"])


@ON_BOTH_CPUS
@pytest.mark.parametrize("tensor", [1, 2])
def test_a_token_s_latent_vector_is_whole_on_every_gpu_of_a_stage(
    tensor: int, directory_of: DirectoryOf
) -> None:
    model = CONFIGS["deepseek"]()
    config = config_of(directory_of(model), tensor_parallel_size=tensor, batching="separated")
    assert kv_bytes_per_token(make_vllm_config(config)) == [4 * 576 * 4, 4 * 576 * 4]
    assert expected_kv_bytes(config, model, num_stages=2) == 4 * 576 * 4


@ON_BOTH_CPUS
def test_latent_attention_is_refused_where_no_run_has_shown_it(directory_of: DirectoryOf) -> None:
    with pytest.raises(ValueError, match="set batching: separated"):
        make_vllm_config(config_of(directory_of(CONFIGS["deepseek"]())))


@ON_BOTH_CPUS
@pytest.mark.parametrize("named", [{}, {"attention_backend": "auto"}, {"attention_backend": "CPU_MLA"}])
def test_an_engine_takes_the_kernels_for_latent_attention_that_read_blocks_apart(
    named: dict[str, str], directory_of: DirectoryOf, caplog: pytest.LogCaptureFixture
) -> None:
    config = config_of(directory_of(CONFIGS["deepseek"]()), batching="separated", vllm=named)
    with caplog.at_level(logging.INFO, logger="pipemax"):
        vllm_config = make_vllm_config(config)
    assert vllm_config.attention_config.backend is AttentionBackendEnum.CPU_MLA
    assert vllm_config.cache_config.block_size == 16, "the one size of these kernels"
    assert ("CPU_MLA" in caplog.text) is (named.get("attention_backend") != "CPU_MLA")


@ON_BOTH_CPUS
@pytest.mark.parametrize(
    "named", [{"attention_backend": "AMX_MLA"}, {"attention_config": {"backend": "AMX_MLA"}}]
)
def test_kernels_that_need_blocks_next_to_each_other_are_refused(
    named: dict[str, object], directory_of: DirectoryOf
) -> None:
    config = config_of(directory_of(CONFIGS["deepseek"]()), batching="separated", vllm=named)
    with pytest.raises(ValueError, match=r"is AMX_MLA, .*leave out vllm\.attention_backend"):
        make_vllm_config(config)


@ON_BOTH_CPUS
def test_stock_vllm_takes_what_kernels_it_likes(directory_of: DirectoryOf) -> None:
    config = config_of(directory_of(CONFIGS["deepseek"]()), policy="vllm")
    assert make_vllm_config(config).attention_config.backend is None


def test_a_model_without_latent_attention_has_vllm_s_usual_kernels() -> None:
    assert make_vllm_config(two_stages()).attention_config.backend is None


def test_latent_attention_that_vllm_runs_as_heads_is_refused(directory_of: DirectoryOf) -> None:
    """Their sizes are not those of the latent vector, by which pools are counted."""
    model = transformers.MiniCPM3Config(
        architectures=["MiniCPM3ForCausalLM"], num_hidden_layers=2, vocab_size=512
    )
    with pytest.raises(ValueError, match="vLLM runs its latent attention as heads"):
        make_vllm_config(config_of(directory_of(model)))


def test_a_model_with_recurrent_layers_is_refused_before_weights_are_read(directory_of: DirectoryOf) -> None:
    """Under ``auto`` the same words are the reason for stock vLLM."""
    model = transformers.LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=512,
        num_hidden_layers=2,
        layer_types=["linear_attention", "full_attention"],
    )
    config = config_of(directory_of(model))
    with pytest.raises(ValueError, match=r"it has Mamba or linear-attention layers \(layer_types"):
        make_vllm_config(config)
    assert "it has Mamba or linear-attention layers" in forecast(config).refusal


def test_every_adapter_has_a_place_in_every_step(tmp_path: Path) -> None:
    for name, rank in (("red", 4), ("blue", 12)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "adapter_config.json").write_text(json.dumps({"r": rank}))
    config = two_stages(lora={name: str(tmp_path / name) for name in ("red", "blue")})
    lora = make_vllm_config(config).lora_config
    assert (lora.max_loras, lora.max_lora_rank) == (3, 16), "and on a CPU one place stays empty"
    with pytest.raises(ValueError, match="max_loras is 1, and a step may need all 2 adapters"):
        make_vllm_config(config.model_copy(update={"vllm": {"max_loras": 1}}))


def test_prompts_stay_whole_where_vllm_does_not_cut_them() -> None:
    whole = {"vllm": {"enable_chunked_prefill": False, "max_num_batched_tokens": 512}}
    with pytest.raises(ValueError, match="set batching: separated"):
        make_vllm_config(two_stages(**whole))
    for values, expected in ((whole, True), ({}, False)):
        vllm_config = make_vllm_config(two_stages(batching="separated", **values))
        assert runtime_settings(vllm_config).whole_prompts is expected


def test_windowed_layers_are_declared_as_full_ones() -> None:
    shape = {"block_size": 32, "num_kv_heads": 2, "head_size": 32, "dtype": torch.float32}
    specs = with_whole_windows(
        {
            "full": FullAttentionSpec(**shape),
            "window": SlidingWindowSpec(**shape, sliding_window=48),
            "chunks": ChunkedLocalAttentionSpec(**shape, attention_chunk_size=64),
        }
    )
    assert {type(spec) for spec in specs.values()} == {FullAttentionSpec}
    assert len({spec.page_size_bytes for spec in specs.values()}) == 1
    assert specs["window"].sliding_window == 48
    assert specs["chunks"].attention_chunk_size == 64
