"""What is wrong with a model or a schema is said in words, before weights are loaded."""

import json
import shutil
from itertools import product
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import pytest
from transformers import AutoConfig

from pipemax.config import EngineConfig, Policy, RowLengths
from pipemax.node.host_pool_size import kv_bytes_per_token
from pipemax.serve.preflight_checks import preflight
from pipemax.vllm_ext.seam.schema_rules import is_refused
from pipemax.wire import GenerationSpec, PreflightReply, PreflightRequest
from tests.engine.conftest import DEMO_MODEL

SCHEMA = (Path(__file__).parents[2] / "examples" / "section.schema.json").read_text()


def ask(
    engine: dict[str, Any] | None = None, prompts: list[str | None] | None = None, **generation: Any
) -> PreflightReply:
    config = {"model": str(DEMO_MODEL), **(engine or {})}
    request = PreflightRequest(
        engine=config,
        generation=GenerationSpec(**generation),
        requests=[{"prompt": prompt} for prompt in prompts or ()],
    )
    return PreflightReply.from_bytes(preflight(request).to_bytes())


def test_a_good_request_is_told_what_it_will_get() -> None:
    reply = ask({"max_model_len": 512}, ["Package: hello", None, "word " * 600], response_format=SCHEMA)
    assert not reply.error
    assert reply.max_model_len == 512
    assert "Package: hello" in reply.first_prompt
    assert reply.first_prompt.startswith("<|begin|>"), "as the chat template renders it"
    good, empty, too_long = reply.prompt_tokens
    assert good > 0
    assert (empty, too_long) == (0, 0), "neither can be a request"
    assert reply.versions["pipemax-spark"]


def test_sampled_rows_tell_their_lengths_where_policy_or_layout_are_open() -> None:
    prompts = ["Package: hello", "Package: hello world", None]
    reply = ask({"policy": "auto"}, prompts, max_tokens=40)
    lengths = RowLengths.model_validate(reply.row_lengths)
    assert [*lengths.prompt_tokens] == sorted(reply.prompt_tokens)[1:], "without the row that is none"
    assert 0 < lengths.shared_prefix_tokens < min(lengths.prompt_tokens)
    assert lengths.max_tokens == 40
    assert ask({"policy": "vllm"}, prompts).row_lengths is not None
    assert ask({"policy": "vllm", "pipeline_parallel_size": 1}, prompts).row_lengths is None
    own = {"prompt_tokens": [5], "max_tokens": 3}
    assert ask({"policy": "auto", "row_lengths": own}, prompts).row_lengths is None, "the config knows better"


def test_replicas_share_the_memory_of_one_engine_and_too_small_parts_are_told() -> None:
    engine = {"policy": "pipemax", "cpu_kv_gib": 0.25, "max_model_len": 512}
    one, two = (ask({**engine, **more}, ["Package: hello"]) for more in ({}, {"replicas": 2}))
    assert one.expected_rows is not None
    assert two.expected_rows is not None
    assert abs(one.expected_rows - two.expected_rows) <= 2
    small = ask({**engine, "cpu_kv_gib": 1e-4, "replicas": 8}, ["Package: hello"])
    assert "cpu_kv_gib 1.25e-05 holds" in small.error
    assert "(each of 8 replicas has its part)" in small.error


def test_sampled_rows_tell_how_many_will_fit_into_the_host_pool() -> None:
    prompts = ["Package: hello", None]

    def rows(max_tokens: int = 40, **engine: Any) -> int | None:
        return ask({"policy": "pipemax", **engine}, prompts, max_tokens=max_tokens).expected_rows

    few, many = rows(host_kv_gib=0.25), rows(host_kv_gib=1.0)
    assert few
    assert many == pytest.approx(4 * few, abs=4)
    assert rows(cpu_kv_gib=0.25) == many, "by default 4 times cpu_kv_gib"
    assert 0 < (rows(400, host_kv_gib=0.25) or 0) < few
    assert rows(policy="vllm") is None, "it has no host pool"
    assert ask({"policy": "pipemax"}, []).expected_rows is None


@pytest.mark.parametrize(
    ("engine", "generation", "told"),
    [
        ({"model": "/no/such/model"}, {}, "model directory '/no/such/model' does not exist on"),
        ({"model": "/tmp"}, {}, "model directory '/tmp' holds no config.json"),
        ({"model": __file__}, {}, "is a file; give the checkpoint's directory"),
        ({"max_model_len": 4096}, {}, "was made for at most 1024 tokens"),
        ({"max_model_length": 5}, {}, "unknown field 'max_model_length'"),
        ({}, {"response_format": '{"type": "objekt"}'}, "response_format is no valid JSON schema: at type"),
        ({}, {"response_format": "{"}, "response_format is not JSON"),
        ({}, {"temperature": -1.0}, "temperature is -1.0"),
        ({}, {"max_tokens": 0}, "max_tokens is 0"),
        (
            {},
            {"regex": "a(?=b)"},
            "regex cannot be enforced while generating: 'a(?=b)' has the lookahead '(?='",
        ),
        ({}, {"grammar": 'foo ::= "a"'}, 'The root rule with name "root" is not found'),
        ({}, {"grammar": "start = a"}, "grammar cannot be enforced while generating: Lark error"),
        (
            {"reasoning_parser": "qwen9"},
            {},
            "reasoning_parser 'qwen9' is unknown to vLLM; it knows cohere_command3",
        ),
        ({}, {"reasoning_effort": "low"}, "does not read 'reasoning_effort'"),
        ({}, {"thinking_tokens": 5}, "thinking_tokens is given, and nothing splits off the model's thinking"),
        (
            {"vllm": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}},
            {"choice": ("a", "b"), "logprobs": True},
            "vLLM drops the probabilities of choices while it speculates",
        ),
        ({}, {"chat_template_kwargs": '{"tokenize": true}'}, "'tokenize', which PipeMax sets itself"),
        (
            {"chat": "never"},
            {"attempts": 2, "attempts_show_error": True},
            "attempts_show_error continues the conversation",
        ),
    ],
)
def test_a_bad_request_is_answered_with_the_reason(
    engine: dict[str, Any], generation: dict[str, Any], told: str
) -> None:
    assert told in ask(engine, **generation).error


def model_with(directory: Path, **changes: Any) -> Path:
    """The demo model with another configuration."""
    model = shutil.copytree(DEMO_MODEL, directory / "model")
    config = json.loads((model / "config.json").read_text()) | changes
    (model / "config.json").write_text(json.dumps(config))
    return model


@pytest.mark.parametrize(
    ("engine", "told"),
    [
        ({"cpu_kv_gib": 0.0003}, "cpu_kv_gib 0.0003 holds the KV of 314 tokens"),
        (
            {"vllm": {"kv_cache_memory_bytes": 400_000}},
            "kv_cache_memory_bytes 400000 holds the KV of 390 tokens",
        ),
        ({"policy": "pipemax", "host_kv_gib": 0.0003}, "host_kv_gib 0.0003 holds the KV of 314 tokens"),
    ],
)
def test_kv_memory_that_cannot_hold_one_request_is_refused_before_an_engine_loads(
    engine: dict[str, Any], told: str
) -> None:
    error = ask({"max_model_len": 512, **engine}).error
    assert told in error
    assert "lower max_model_len, or raise pipeline_parallel_size" in error
    assert not ask({"max_model_len": 300, **engine}).error
    assert not ask({"max_model_len": 512, **engine, "pipeline_parallel_size": 2}).error, (
        "half of the layers each"
    )


def test_kv_blocks_that_cannot_hold_one_request_are_refused_before_an_engine_loads() -> None:
    engine = {"block_size": 32, "vllm": {"num_gpu_blocks_override": 16}}
    assert (
        "num_gpu_blocks_override 16 holds the KV of 480 tokens" in ask({"max_model_len": 512, **engine}).error
    )
    assert not ask({"max_model_len": 480, **engine}).error


def test_kv_memory_of_a_model_that_may_need_less_is_left_to_vllm(tmp_path: Path) -> None:
    """Under policy pipemax the whole KV of a window is kept."""
    small: dict[str, Any] = {"max_model_len": 512, "cpu_kv_gib": 0.0003}
    windowed = small | {"model": str(model_with(tmp_path, model_type="mistral", sliding_window=128))}
    assert not ask(windowed).error
    assert "cpu_kv_gib 0.0003 holds the KV of 314 tokens" in ask({**windowed, "policy": "pipemax"}).error
    assert not ask({**small, "vllm": {"kv_cache_dtype": "nvfp4"}}).error
    scaled = model_with(tmp_path / "scaled", quantization_config={"kv_cache_scheme": {"num_bits": 8}})
    assert not ask({"model": str(scaled), **small}).error


def test_fp8_kv_has_room_for_twice_the_tokens() -> None:
    """Bytes for 314 tokens of 16-bit KV."""
    small: dict[str, Any] = {"cpu_kv_gib": 0.0003}
    for fp8 in ({"kv_cache_dtype": "fp8"}, {"vllm": {"kv_cache_dtype": "fp8_e5m2"}}):
        assert not ask({"max_model_len": 628, **small, **fp8}).error
        assert "holds the KV of 629 tokens" in ask({"max_model_len": 640, **small, **fp8}).error


@pytest.mark.parametrize("stages", [1, 2])
def test_the_kv_of_a_token_is_what_vllm_itself_computes(stages: int) -> None:
    from pipemax.vllm_ext.launch import known_calibration
    from pipemax.vllm_ext.launch.vllm_config import make_vllm_config

    config = EngineConfig(model=str(DEMO_MODEL), policy=Policy.VLLM, pipeline_parallel_size=stages)
    of_vllm = known_calibration.kv_bytes_per_token(make_vllm_config(config))
    own = kv_bytes_per_token(config, AutoConfig.from_pretrained(DEMO_MODEL), num_stages=stages)
    assert own == max(of_vllm)


def test_a_model_that_pipemax_cannot_serve_is_refused_at_once_and_auto_takes_stock_vllm(
    tmp_path: Path,
) -> None:
    layers = ["linear_attention", "full_attention"]
    hybrid = model_with(tmp_path, layer_types=layers, num_hidden_layers=2)
    error = ask({"model": str(hybrid), "policy": "pipemax"}).error
    assert "it has Mamba or linear-attention layers (layer_types: linear_attention)" in error
    assert error.endswith("Use policy: vllm, or auto, which takes stock vLLM for it")
    for policy in ("auto", "vllm"):
        assert not ask({"model": str(hybrid), "policy": policy}).error


def test_adapters_are_checked_and_their_content_is_part_of_the_model_s_identity(tmp_path: Path) -> None:
    adapter = tmp_path / "red"
    adapter.mkdir()
    engine = {"lora": {"red": str(adapter)}}
    assert "adapter 'red':" in ask(engine).error
    (adapter / "adapter_config.json").write_text('{"r": 8}')
    (adapter / "adapter_model.safetensors").write_bytes(b"weights")
    with_red = ask(engine, lora="red")
    assert not with_red.error
    assert with_red.model_fingerprint != ask().model_fingerprint
    (adapter / "adapter_model.safetensors").write_bytes(b"others")
    assert ask(engine).model_fingerprint != with_red.model_fingerprint
    assert "there is no adapter 'blue': the engine config names red" in ask(engine, lora="blue").error


def test_an_architecture_that_this_vllm_lacks_is_refused(tmp_path: Path) -> None:
    unknown = model_with(tmp_path, architectures=["FooForCausalLM"])
    error = ask({"model": str(unknown)}).error
    assert "has the architecture FooForCausalLM, which the engine environment's vLLM does not have" in error
    assert not ask({"model": str(unknown), "vllm": {"hf_overrides": {"architectures": []}}}).error


@pytest.mark.parametrize(
    "changes",
    [
        {"architectures": ["CTRLLMHeadModel"]},
        {"architectures": ["FooForCausalLM"], "auto_map": {"AutoModelForCausalLM": "model.Foo"}},
        {
            "architectures": ["FooSpeculator"],
            "speculators_config": {"verifier": {"name_or_path": "org/model"}},
        },
    ],
    ids=["transformers has it", "its code comes with it", "for another model"],
)
def test_an_architecture_that_vllm_may_accept_is_left_to_it(tmp_path: Path, changes: dict[str, Any]) -> None:
    assert not ask({"model": str(model_with(tmp_path, **changes))}).error


def test_an_architecture_that_vllm_converts_is_left_to_it_for_its_own_task(tmp_path: Path) -> None:
    classifier = {"model": str(model_with(tmp_path, architectures=["LlamaForSequenceClassification"]))}
    assert "classifies and cannot generate" in ask(classifier).error
    assert not ask({**classifier, "task": "classify"}, task="classify").error


def test_weights_that_are_missing_or_cut_off_are_refused(tmp_path: Path) -> None:
    model = model_with(tmp_path)
    weights, index = model / "model.safetensors", model / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}))
    assert (
        "lacks 1 of the 2 files that model.safetensors.index.json lists, model-2.safetensors"
        in ask({"model": str(model)}).error
    )
    index.unlink()
    whole = weights.read_bytes()
    for size in (4, 1_000, len(whole) - 1):
        weights.write_bytes(whole[:size])
        assert "model.safetensors' are cut off or broken" in ask({"model": str(model)}).error
    weights.unlink()
    assert "holds no weights" in ask({"model": str(model)}).error
    assert not ask({"model": str(model), "vllm": {"load_format": "dummy"}}).error


@pytest.mark.parametrize(
    ("schema", "told"),
    [
        ({"type": "integer", "minimum": 5, "maximum": 3}, "minimum (5) is greater than maximum (3)"),
        ({"type": "string", "minLength": 9, "maxLength": 3}, "minLength (9) is greater than maxLength (3)"),
        ({"type": "integer", "enum": ["a"]}, "can be met by no output: incompatible types"),
        ({"enum": []}, "can be met by no output"),
        (
            {"type": "object", "required": ["b"], "additionalProperties": False},
            "required property 'b' is unsatisfiable",
        ),
        (
            {"type": "object", "properties": {"n": {"type": "integer", "minimum": 5, "maximum": 3}}},
            "cannot be enforced while generating: Invalid range: minimum greater than maximum",
        ),
        (
            {"type": "array", "uniqueItems": True},
            "keywords that cannot be enforced while generating: uniqueItems;",
        ),
        ({"type": "string", "format": "colour"}, "has the format 'colour', which cannot be enforced"),
    ],
)
def test_a_schema_that_no_output_can_meet_or_no_engine_enforce_is_refused(
    schema: dict[str, Any], told: str
) -> None:
    assert told in ask(response_format=json.dumps(schema)).error


OBJECT = {"type": "object", "properties": {"a": {"type": "string"}}}
ONLY_GUIDANCE = [
    {"type": "integer", "multipleOf": 7},
    {"type": "string", "pattern": "^[a-z]+$", "maxLength": 3},
    {"allOf": [{"type": "string"}, {"enum": ["yes", "no"]}]},
]
ONLY_XGRAMMAR = [
    {"type": "object", "patternProperties": {"^a": {"type": "string"}}},
    {"type": "object", "propertyNames": {"pattern": "^[a-z]+$"}, "additionalProperties": {"type": "string"}},
]
LETTERS = {"type": "string", "pattern": r"^\p{L}+$"}
QUOTED = {"type": "string", "pattern": r"^\"\p{L}+\"$"}
PATTERNS_FOR_GUIDANCE = [
    QUOTED,
    {"type": "string", "pattern": "^https://"},
    {"pattern": "^a$"},
    {"type": "string", "pattern": "^a", "enum": ["a", "b"]},
    {"type": "string", "allOf": [{"pattern": "^a$"}]},
]
NEITHER = [{**OBJECT, "patternProperties": {"^b": {"type": "string"}}}]


def settings(*schemas: dict[str, Any], **engine: Any) -> PreflightReply:
    """The reply to a job that asks for these schemas, the first for the rows and the others as questions."""
    first, *others = [GenerationSpec(response_format=json.dumps(schema)) for schema in schemas]
    config = {"model": str(DEMO_MODEL), **engine}
    names = tuple(f"q{number}" for number in range(len(others)))
    return preflight(
        PreflightRequest(engine=config, generation=first, questions=tuple(others), question_names=names)
    )


def test_the_backend_is_one_that_takes_all_schemas_and_white_space_is_allowed_where_none_does() -> None:
    guidance, any_space = {"json_backend": "guidance"}, {"json_whitespace": "any"}
    one_of = {"oneOf": [{"type": "string"}, {"type": "string", "maxLength": 3}]}
    for schema in (OBJECT, one_of, *ONLY_XGRAMMAR):
        reply = settings(schema)
        assert (reply.error, reply.engine_settings) == ("", {}), schema
        assert settings(OBJECT, schema).engine_settings == {}, schema
    for schema in ONLY_GUIDANCE:
        reply = settings(schema)
        assert reply.engine_settings == guidance, (schema, reply.error)
        assert settings(OBJECT, schema).engine_settings == guidance, schema
        assert settings(ONLY_XGRAMMAR[0], schema).engine_settings == any_space, schema
        own = {"vllm": {"structured_outputs_config": {"backend": "xgrammar"}}}
        assert "the backend xgrammar of structured_outputs_config cannot" in settings(schema, **own).error
    for schema in NEITHER:
        assert settings(schema).engine_settings == any_space, schema
    for engine in (
        {"json_whitespace": "any"},
        {"vllm": {"structured_outputs_config": {"backend": "guidance"}}},
        {"vllm": {"structured_outputs_config": '{"backend": "auto"}'}},
    ):
        reply = settings(ONLY_GUIDANCE[0], **engine)
        assert (reply.error, reply.engine_settings) == ("", {}), engine


def test_a_pattern_that_xgrammar_would_misread_goes_to_guidance_or_is_refused_by_name() -> None:
    assert settings(LETTERS).engine_settings == {}
    keys = {"type": "object", "patternProperties": {r"^\p{L}": {"type": "string"}}}
    assert settings(keys).engine_settings == {}, (
        "what xgrammar generates is right, and guidance takes no such keys"
    )
    for schema in PATTERNS_FOR_GUIDANCE:
        assert settings(schema).engine_settings == {"json_backend": "guidance"}, schema
    for schema in (QUOTED, *PATTERNS_FOR_GUIDANCE[2:]):
        for reply in (settings(keys, schema), settings(schema, json_whitespace="any")):
            assert "response_format has the pattern" in reply.error, schema
        own = {"vllm": {"structured_outputs_config": {"backend": "xgrammar"}}}
        assert "the backend xgrammar of structured_outputs_config cannot" in settings(schema, **own).error
    named = settings(
        OBJECT, {"type": "object", "properties": {"name": {"type": "string", "pattern": "^(?=a)"}}}
    )
    assert named.error.startswith(
        "ask: question 'q0': response_format has the pattern '^(?=a)' at properties/name with the lookahead '(?='"
    )


def test_what_a_backend_takes_is_what_vllm_says() -> None:
    from vllm.v1.structured_output.backend_guidance import has_guidance_unsupported_json_features
    from vllm.v1.structured_output.backend_xgrammar import has_xgrammar_unsupported_json_features

    told = {
        "xgrammar": has_xgrammar_unsupported_json_features,
        "guidance": has_guidance_unsupported_json_features,
    }
    for backend, schema in product(told, [OBJECT, *ONLY_XGRAMMAR, *ONLY_GUIDANCE, *NEITHER]):
        assert is_refused(backend, schema) == told[backend](schema), (backend, schema)


@pytest.mark.parametrize(
    ("own", "told"),
    [
        ({"backend": "outlines", "disable_any_whitespace": True}, "only supported for xgrammar and guidance"),
        ({"backend": "xgramar"}, "'xgramar'"),
        ({"bakend": "xgrammar"}, "bakend"),
        ({"disable_additional_properties": True}, "only supported for the guidance backend"),
        ("{", "is not JSON"),
        ([1], "give a mapping"),
    ],
)
def test_settings_of_structured_outputs_that_vllm_refuses_are_refused(own: Any, told: str) -> None:
    error = ask({"vllm": {"structured_outputs_config": own}}).error
    assert "structured_outputs_config" in error
    assert told in error


def test_the_check_names_the_arguments_that_it_moved() -> None:
    reply = ask({"model": "/no/such/model", "vllm": {"max_num_seqs": 4, "load_format": "dummy"}})
    (line,) = reply.warnings
    assert line.startswith("engine config: max_num_seqs under vllm change no answer")
    assert "no/such/model" in reply.error
    assert ask({"model": "/no"}).warnings == []


def test_a_system_prompt_without_a_chat_template_is_refused(tmp_path: Path) -> None:
    model = shutil.copytree(DEMO_MODEL, tmp_path / "model")
    (model / "chat_template.jinja").unlink()
    assert "a system prompt needs a chat template" in ask({"model": str(model)}, system="Be brief.").error
    assert not ask({"model": str(model)}).error


def test_the_fingerprint_is_of_the_content_not_of_the_place(tmp_path: Path) -> None:
    model = shutil.copytree(DEMO_MODEL, tmp_path / "model")
    (model / "README.md").write_text("prose")
    assert ask({"model": str(model)}).model_fingerprint == ask().model_fingerprint
    weights = bytearray((model / "model.safetensors").read_bytes())
    weights[len(weights) // 2 :: 1_000] = bytes(len(weights[len(weights) // 2 :: 1_000]))  # as training would
    (model / "model.safetensors").write_bytes(weights)
    assert ask({"model": str(model)}).model_fingerprint != ask().model_fingerprint


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (
            {"choice": tuple(map("".join, product(ascii_lowercase, repeat=2))), "logprobs": True},
            "more than 128 choices part at one place, and logprobs can score at most 128",
        ),
        ({"choice": ("yes", "<|end|>")}, "choice '<|end|>' holds '<|end|>', a special token of the model"),
        ({"chat_template_kwargs": '{"no_such_variable": true}'}, "does not read 'no_such_variable'"),
        ({"regex": "(a"}, "regex cannot be enforced"),
        ({"include_reasoning": True}, "nothing splits off the model's thinking; set reasoning_parser"),
        ({"lora": "none"}, "there is no adapter 'none': the engine config names none (lora:)"),
        ({"task": "embed"}, "embed"),
    ],
)
def test_a_question_s_settings_pass_the_checks_of_the_job_s(settings: dict[str, Any], told: str) -> None:
    of_job = ask(**settings)
    assert told in of_job.error
    request = PreflightRequest(
        engine={"model": str(DEMO_MODEL)},
        generation=GenerationSpec(),
        questions=(GenerationSpec(), GenerationSpec(**settings)),
        question_names=("tone", "kind"),
    )
    error = preflight(request).error
    assert error.endswith(of_job.error)
    assert "question 'kind'" in error
