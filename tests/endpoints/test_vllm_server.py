"""A real vLLM server as an endpoint: rows are answered as by the engine that runs vLLM itself.

Choices are another matter: the server may spell one in any tokens, where the engine takes the
tokenizer's spelling only.
"""

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from pipemax.api import EngineConfig, OfflineEngine, Sampling
from pipemax.domain.errors import EngineStartError
from pipemax.endpoint_config import EndpointConfig
from pipemax.endpoints.probe import probe
from pipemax.wire import ErrorCode
from tests.endpoints.real import (
    KEY_VARIABLE,
    DemoJob,
    assert_equal_answers,
    completions,
    demo_prompts,
    endpoint_config,
    endpoint_engine,
    endpoint_values,
)
from tests.endpoints.servers import KEY, MAX_MODEL_LEN, REPOSITORY, ModelServer, vllm_server
from tests.engine.conftest import DEFAULTS

pytestmark = pytest.mark.long  # a server and an engine, each a minute

SECTIONS = ("libs", "libdevel", "doc", "python", 'it\'s "odd"\n')
SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"section": {"enum": [*SECTIONS]}, "sure": {"type": "boolean"}},
        "required": ["section", "sure"],
        "additionalProperties": False,
    }
)
# As PipeMax's engine does: otherwise the server allows white space between JSON's tokens, and models loop in it.
COMPACT = ("--structured-outputs-config", '{"backend": "xgrammar", "disable_any_whitespace": true}')
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "cut": {"max_tokens": 3},
    "with a schema": {"response_format": SCHEMA},
    "with a regular expression": {"regex": "[a-c]{3}-(x|y)"},
    "with a grammar": {"grammar": 'root ::= "yes " | "no " root'},
    "with stop texts": {"stop": ("}", "libd")},
    "with penalties": {"repetition_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": 0.25},
    "of a length": {"min_tokens": 12, "max_tokens": 12},
    "past the end": {"ignore_eos": True, "max_tokens": 12},
    "without a word": {"bad_words": ("libdevel",)},
    "sampled": {"temperature": 1.5, "seed": 5},
    "sampled from few": {"temperature": 2.0, "seed": 5, "top_p": 0.9, "top_k": 40, "min_p": 0.001},
    "three times": {"temperature": 1.5, "seed": 7, "n": 3},
    "until valid": {"temperature": 2.0, "seed": 7, "attempts": 4, "response_format": SCHEMA, "max_tokens": 9},
    "with log-probabilities": {"logprobs": True},
}


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory, unit_end: ExitStack) -> ModelServer:
    return unit_end.enter_context(
        vllm_server(tmp_path_factory.mktemp("server"), "--max-model-len", str(MAX_MODEL_LEN), *COMPACT)
    )


@pytest.fixture(scope="session", params=["auto", "never"])
def engines(
    request: pytest.FixtureRequest, server: ModelServer
) -> Iterator[tuple[OfflineEngine, OfflineEngine]]:
    """The endpoint's and the one that runs vLLM, by chat and by plain prompts."""
    with ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # it starts in half the time
        config = DEFAULTS | {"policy": "vllm", "chat": request.param}
        itself = stack.enter_context(OfflineEngine(EngineConfig.parse(config)))
        asked = [_sampling(settings) for settings in (*SETTINGS.values(), {"choice": SECTIONS})]
        yield stack.enter_context(endpoint_engine(server, *asked, chat=request.param)), itself


def _sampling(settings: dict[str, Any]) -> Sampling:
    return Sampling(**{"max_tokens": 24} | settings)


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_rows_are_answered_as_by_the_engine_itself(
    engines: tuple[OfflineEngine, OfflineEngine], settings: dict[str, Any]
) -> None:
    endpoint, itself = engines
    sampling = _sampling(settings)
    prompts = [*demo_prompts(24), "x", "Grüße: ß\u2028\U0001f600"]
    assert_equal_answers(completions(endpoint, prompts, sampling), completions(itself, prompts, sampling))


def test_tokens_are_those_of_the_engine_itself(
    engines: tuple[OfflineEngine, OfflineEngine], server: ModelServer, request: pytest.FixtureRequest
) -> None:
    _, itself = engines
    chat = request.node.callspec.params["engines"]
    prompts, sampling = demo_prompts(48), Sampling(max_tokens=24)
    with endpoint_engine(server, chat=chat, extra_body={"return_token_ids": True}) as endpoint:
        found = [row.token_ids for row in completions(endpoint, prompts, sampling)]
    assert all(found)
    assert found == [row.token_ids for row in completions(itself, prompts, sampling)]


def test_choices_are_answered_with_their_probabilities(engines: tuple[OfflineEngine, OfflineEngine]) -> None:
    endpoint, _ = engines
    sampling = Sampling(choice=SECTIONS, logprobs=True)
    prompts = demo_prompts(24)
    found = completions(endpoint, prompts, sampling)
    for row in found:
        assert row.error is None
        assert row.text in SECTIONS
        probabilities = dict(row.probabilities or ())
        assert probabilities[row.text] == row.probability
        assert sum(probabilities.values()) <= 1 + 1e-6


def test_rows_that_the_server_refuses_are_typed_errors(
    engines: tuple[OfflineEngine, OfflineEngine], request: pytest.FixtureRequest
) -> None:
    endpoint, itself = engines
    prompts = ["word " * 3000, "1 " * 600, "", None, " ", *demo_prompts(2)]
    sampling = Sampling(max_tokens=24)
    found = completions(endpoint, prompts, sampling)
    assert [row.error and row.error.code for row in found] == [
        *(ErrorCode.PROMPT_TOO_LONG, ErrorCode.PROMPT_TOO_LONG),
        *(ErrorCode.EMPTY_PROMPT, ErrorCode.EMPTY_PROMPT, ErrorCode.EMPTY_PROMPT),
        *(None, None),
    ]
    assert_equal_answers(found[5:], completions(itself, prompts[5:], sampling))
    (bad,) = completions(endpoint, ["x"], Sampling(regex="(?=x)y"))
    assert bad.error is not None
    assert "(400)" in bad.error.message


def test_another_model_or_a_wrong_key_ends_the_check(server: ModelServer) -> None:
    with pytest.raises(ValueError, match="serves no model 'other'; it serves 'demo'"):
        endpoint_config(server, model="other")
    config = EndpointConfig.parse(endpoint_values(server)).with_keys({KEY_VARIABLE: "sk-wrong"})
    with pytest.raises(ValueError, match=f"refuses the key \\({KEY_VARIABLE}\\): 401") as caught:
        probe(config, [])
    assert "sk-wrong" not in str(caught.value)
    with pytest.raises(EngineStartError, match="refuses the key"):
        OfflineEngine(config)


def test_a_job_writes_the_rows_of_one_with_the_engine_itself(server: ModelServer, tmp_path: Path) -> None:
    """In two runs, of which the second goes on where the first ended."""
    schema = str(REPOSITORY / "examples" / "section.schema.json")
    arguments = ("--response-format", schema, "--logprobs")
    job = DemoJob(tmp_path / "endpoint", endpoint_values(server), *arguments, rows=200)
    first, second = job.run("--limit", "80"), job.run()
    assert (first["rows_out"], second["rows_out"], second["rows_skipped"]) == (80, 120, 80)
    assert [run["endpoint_requests"] for run in (first, second)] == [80, 120]
    found = job.answers()
    assert sum(run["billed_output_tokens"] for run in (first, second)) == sum(
        answer["completion_tokens"] for answer in found.values()
    )
    assert job.files_with(KEY) == []

    itself = DemoJob(tmp_path / "itself", DEFAULTS | {"policy": "vllm"}, *arguments, rows=200)
    itself.run()
    expected = itself.answers()
    assert found.keys() == expected.keys()
    for package, answer in found.items():
        own = expected[package]
        for name in ("text", "parsed", "finish_reason", "prompt_tokens", "completion_tokens", "error"):
            assert answer[name] == own[name], (package, answer, own)
        assert answer["logprob_sum"] == pytest.approx(own["logprob_sum"], abs=1e-3)
