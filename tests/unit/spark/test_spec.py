"""What makes two specs differ."""

from collections.abc import Mapping
from typing import Any

import pytest

from pipemax.config import EngineConfig
from pipemax.wire import GenerationSpec, PreflightReply
from pipemax_spark.request.prompts import PromptSource
from pipemax_spark.request.spec import AnnotationSpec


def spec(asked: Mapping[str, Any] | None = None, **engine: Any) -> AnnotationSpec:
    return AnnotationSpec.of(
        PreflightReply(model="a-model", model_fingerprint="0123", engine={"chat": "auto", **engine}),
        source=PromptSource(template="Say {text}"),
        generation=GenerationSpec(max_tokens=16, **(asked or {})),
        time_zone=None,
    )


def test_a_spec_without_arguments_of_vllm_hashes_as_it_always_did() -> None:
    """Tables of earlier versions hold this hash."""
    assert spec(vllm={}).hash == spec().hash == "065285d4e47cee7c"


@pytest.mark.parametrize(
    "asked",
    [
        {"choice": ("a", "b")},
        {"regex": "a|b"},
        {"grammar": 'root ::= "a"'},
        {"logprobs": True},
        {"n": 2},
        {"attempts": 2},
        {"attempts_show_error": True},
        {"chat_template_kwargs": '{"enable_thinking": false}'},
        {"reasoning_effort": "low"},
        {"include_reasoning": False},
    ],
)
def test_whatever_a_job_asks_of_the_model_makes_another_spec(asked: dict[str, Any]) -> None:
    changed = spec(asked)
    assert changed.hash != spec().hash
    (told,) = changed.changes_from(spec())
    assert told.startswith(f"{next(iter(asked))} was not given, is ")


@pytest.mark.parametrize(
    "arguments",
    [
        {"kv_cache_dtype": "fp8"},
        {"hf_overrides": {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}},
        {"load_format": "dummy"},
        {"generation_config": "vllm"},
        {"quantization_config": {"linear": "fp8"}},
        {"an_argument_of_a_later_vllm": True},
    ],
)
def test_an_argument_of_vllm_that_may_change_answers_makes_another_spec(arguments: dict[str, Any]) -> None:
    assert spec(vllm=arguments).hash != spec().hash
    (told,) = spec(vllm=arguments).changes_from(spec())
    assert told.startswith(f"vllm.{next(iter(arguments))} was not given, is ")


def test_what_stands_under_vllm_speed_makes_no_other_spec() -> None:
    speed = {"vllm_speed": {"max_num_seqs": 64, "an_argument_of_a_later_vllm": True}}
    assert spec(**speed).hash == spec().hash


@pytest.mark.parametrize(
    "arguments",
    [
        {"gpu_memory_utilization": 0.8, "max_num_seqs": 64, "enforce_eager": True},
        {"kv_transfer_config": {"kv_connector": "SomeConnector"}},
        {"compilation_config": {"level": 0}, "cpu_offload_gb": 4},
        {"disable_log_stats": True, "decode_context_parallel_size": 2},
    ],
)
def test_tables_whose_configs_had_such_arguments_under_vllm_keep_their_spec(
    arguments: dict[str, Any],
) -> None:
    def parsed(**vllm: Any) -> AnnotationSpec:
        config = EngineConfig.parse({"model": "m", "policy": "vllm", "vllm": vllm})
        return spec(vllm=config.vllm, vllm_speed=config.vllm_speed)

    assert parsed(**arguments).hash == spec().hash
    assert parsed(**arguments, kv_cache_dtype="fp8").hash == spec(vllm={"kv_cache_dtype": "fp8"}).hash


def test_the_order_of_vllm_s_arguments_makes_no_other_spec() -> None:
    scaling = {"rope_type": "yarn", "factor": 4.0}
    one = {"kv_cache_dtype": "fp8", "hf_overrides": {"rope_scaling": scaling, "rope_theta": 1}}
    backwards = dict(reversed(scaling.items()))
    other = {"hf_overrides": {"rope_theta": 1, "rope_scaling": backwards}, "kv_cache_dtype": "fp8"}
    assert spec(vllm=one).hash == spec(vllm=other).hash


def test_fp8_kv_is_the_same_spec_however_it_is_written() -> None:
    """``vllm: {kv_cache_dtype: fp8}`` was the only way before the field: its tables go on."""
    field = spec(kv_cache_dtype="fp8")
    assert field.hash == spec(vllm={"kv_cache_dtype": "fp8"}).hash != spec().hash
    assert field.hash == spec(kv_cache_dtype="fp8_e5m2", vllm={"kv_cache_dtype": "fp8"}).hash, "as for vLLM"
    assert field.changes_from(spec()) == ['vllm.kv_cache_dtype was not given, is "fp8"']


@pytest.mark.parametrize("name", ["dtype", "kv_cache_dtype"])
def test_a_type_left_at_auto_adds_nothing(name: str) -> None:
    assert spec(**{name: "auto"}).hash == spec().hash


def test_the_type_of_weights_and_activations_makes_another_spec() -> None:
    assert spec(dtype="float32").hash == spec(vllm={"dtype": "float32"}).hash
    assert len({spec(dtype=dtype).hash for dtype in ("auto", "float32", "bfloat16")}) == 3
