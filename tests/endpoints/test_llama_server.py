"""llama-cpp-python's server as an endpoint, with the demo model: another implementation and another API's limits.

Its answers are those of the engine that runs vLLM, where both are asked for the same. It does not count the token that
ends an answer, and writes choices as a schema. ``make llama`` makes it; without it these tests are skipped.
"""

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from pipemax.api import EngineConfig, OfflineEngine, Sampling
from pipemax.wire import ErrorCode
from tests.endpoints.real import (
    DemoJob,
    assert_equal_answers,
    completions,
    demo_prompts,
    demo_rows,
    endpoint_config,
    endpoint_engine,
    endpoint_values,
)
from tests.endpoints.servers import LLAMA, ModelServer, llama_server
from tests.engine.conftest import DEFAULTS

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not (LLAMA / "demo.gguf").exists(), reason="there is no .venv-llama: run make llama"),
]

# This server does not escape a quote in a schema's choices, and dies of it.
SECTIONS = ("libs", "libdevel", "doc", "python")
SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"section": {"enum": [*SECTIONS]}},
        "required": ["section"],
        "additionalProperties": False,
    }
)
SAME: dict[str, dict[str, Any]] = {
    "greedy": {},
    "cut": {"max_tokens": 3},
    "with stop texts": {"stop": ("}", "libd")},
    "with a grammar": {"grammar": 'root ::= "yes" | "no"'},
    "with log-probabilities": {"logprobs": True},
}


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory, unit_end: ExitStack) -> ModelServer:
    return unit_end.enter_context(llama_server(tmp_path_factory.mktemp("llama")))


@pytest.fixture(scope="session")
def endpoint(server: ModelServer, unit_end: ExitStack) -> OfflineEngine:
    asked = [Sampling(**settings) for settings in (*SAME.values(), {"choice": SECTIONS})]
    return unit_end.enter_context(endpoint_engine(server, *asked))


@pytest.fixture(scope="session")
def itself() -> Iterator[OfflineEngine]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # it starts in half the time
        with OfflineEngine(EngineConfig.parse(DEFAULTS | {"policy": "vllm"})) as engine:
            yield engine


@pytest.mark.parametrize("settings", SAME.values(), ids=SAME)
def test_rows_are_answered_as_by_vllm(
    endpoint: OfflineEngine, itself: OfflineEngine, settings: dict[str, Any]
) -> None:
    sampling = Sampling(**{"max_tokens": 24} | settings)
    prompts = [*demo_prompts(24), "x", "Grüße: ß\u2028\U0001f600"]
    found, expected = completions(endpoint, prompts, sampling), completions(itself, prompts, sampling)
    assert_equal_answers(found, expected, but=("completion_tokens", "logprob_mean"))
    for one, other in zip(found, expected, strict=True):
        assert other.completion_tokens - one.completion_tokens in (0, 1)  # the end


def test_a_schema_is_followed(endpoint: OfflineEngine) -> None:
    for row in completions(endpoint, demo_prompts(24), Sampling(response_format=SCHEMA)):
        assert json.loads(row.text or "")["section"] in SECTIONS


def test_a_choice_is_taken_from_a_schema(endpoint: OfflineEngine) -> None:
    for row in completions(endpoint, demo_prompts(24), Sampling(choice=SECTIONS, logprobs=True)):
        assert row.text in SECTIONS
        assert 0 < (row.probability or 0) <= 1 + 1e-6


def test_samples_are_the_same_again_with_their_seeds(endpoint: OfflineEngine) -> None:
    sampling = Sampling(temperature=2.0, n=3, seed=7, max_tokens=12)
    once, again = (completions(endpoint, demo_prompts(8), sampling) for _ in range(2))
    assert [row.samples for row in once] == [row.samples for row in again]
    assert all(len(row.samples or ()) == 3 for row in once)
    assert any(len({*(row.samples or ())}) > 1 for row in once)


def test_rows_that_the_server_refuses_are_typed_errors(endpoint: OfflineEngine) -> None:
    found = completions(endpoint, ["word " * 3000, "", None, *demo_prompts(2)], Sampling(max_tokens=24))
    assert [row.error and row.error.code for row in found] == [
        *(ErrorCode.PROMPT_TOO_LONG, ErrorCode.EMPTY_PROMPT, ErrorCode.EMPTY_PROMPT),
        *(None, None),
    ]


def test_what_the_server_ignores_is_refused_before_the_job(server: ModelServer) -> None:
    """It answers 200 to all of these."""
    with pytest.raises(ValueError, match="serves no model 'other'; it serves 'demo'"):
        endpoint_config(server, model="other")
    with pytest.raises(ValueError, match="regex"):
        endpoint_config(server, Sampling(regex="[a-c]{3}"))
    with pytest.raises(ValueError, match="min_tokens"):
        endpoint_config(server, Sampling(min_tokens=5))


def test_a_job_writes_the_engines_answers(server: ModelServer, itself: OfflineEngine, tmp_path: Path) -> None:
    job = DemoJob(tmp_path / "job", endpoint_values(server), rows=100)
    summary = job.run()
    assert (summary["rows_out"], summary["rows_error"], summary["complete"]) == (100, 0, True)
    assert (summary["endpoint_requests"], summary["endpoint_retries"]) == (100, 0)
    found, prompts = job.answers(), demo_rows(100)
    for package, own in zip(
        prompts, completions(itself, [*prompts.values()], Sampling(max_tokens=24)), strict=True
    ):
        assert found[package]["text"] == own.text
