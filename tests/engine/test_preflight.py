"""What is wrong with a model or a schema is said in words, before weights are loaded."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from pipemax.config import RowLengths
from pipemax.serve.preflight_checks import preflight
from pipemax.wire import GenerationSpec, PreflightReply, PreflightRequest
from tests.engine.conftest import DEMO_MODEL

SCHEMA = (Path(__file__).parents[2] / "examples" / "section.schema.json").read_text()


def ask(
    engine: dict[str, Any] | None = None, prompts: list[str | None] | None = None, **generation: Any
) -> PreflightReply:
    config = {"model": str(DEMO_MODEL), **(engine or {})}
    request = PreflightRequest(engine=config, generation=GenerationSpec(**generation), prompts=prompts or [])
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


def test_sampled_rows_tell_their_lengths_to_policy_auto_alone() -> None:
    prompts = ["Package: hello", "Package: hello world", None]
    reply = ask({"policy": "auto"}, prompts, max_tokens=40)
    lengths = RowLengths.model_validate(reply.row_lengths)
    assert [*lengths.prompt_tokens] == sorted(reply.prompt_tokens)[1:], "without the row that is none"
    assert 0 < lengths.shared_prefix_tokens < min(lengths.prompt_tokens)
    assert lengths.max_tokens == 40
    assert ask({"policy": "vllm"}, prompts).row_lengths is None
    own = {"prompt_tokens": [5], "max_tokens": 3}
    assert ask({"policy": "auto", "row_lengths": own}, prompts).row_lengths is None, "the config knows better"


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
    ],
)
def test_a_bad_request_is_answered_with_the_reason(
    engine: dict[str, Any], generation: dict[str, Any], told: str
) -> None:
    assert told in ask(engine, **generation).error


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


@pytest.mark.parametrize(
    "schema",
    [
        {
            "type": "object",
            "propertyNames": {"pattern": "^[a-z]+$"},
            "additionalProperties": {"type": "string"},
        },
        {"type": "integer", "multipleOf": 7, "title": "n", "default": 0},
        {"oneOf": [{"type": "string"}, {"type": "string", "maxLength": 3}]},
    ],
)
def test_what_one_of_vllm_s_two_grammar_compilers_knows_is_accepted(schema: dict[str, Any]) -> None:
    assert not ask(response_format=json.dumps(schema)).error


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
