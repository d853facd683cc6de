"""What of an endpoint makes another spec, and what does not."""

from collections.abc import Iterator
from typing import Any

import pytest

from pipemax.serve.preflight_checks import preflight
from pipemax.wire import GenerationSpec, PreflightRequest
from pipemax_spark.engines.config import engine_config
from pipemax_spark.errors import JobError
from pipemax_spark.request.spec import AnnotationSpec
from tests.endpoints.openai_server import OpenAIServer, openai_server


@pytest.fixture(scope="module")
def served() -> Iterator[OpenAIServer]:
    with openai_server() as server:
        yield server


def spec(server: OpenAIServer, **changes: Any) -> AnnotationSpec:
    request = PreflightRequest(engine=server.config(**changes), generation=GenerationSpec())
    reply = preflight(request)
    assert reply.error == ""
    return AnnotationSpec.of(reply, source=None, generation=request.generation, time_zone=None)


def test_the_same_model_at_another_url_is_the_same_spec(served: OpenAIServer) -> None:
    with openai_server() as elsewhere:
        assert spec(elsewhere).hash == spec(served).hash
    assert str(served.port) not in spec(served).to_json()


@pytest.mark.parametrize(
    "changes",
    [
        {"max_concurrency": 3},
        {"max_requests_per_minute": 9000},
        {"timeout_s": 30},
        {"executors": 4},
        {"api_key_env": "ENDPOINT_KEY"},
        {"headers": {"X-Team": "a"}},
    ],
)
def test_limits_and_keys_make_no_other_spec(
    served: OpenAIServer, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ENDPOINT_KEY", "sk-secret")
    assert spec(served, **changes).hash == spec(served).hash


@pytest.mark.parametrize(
    "changes",
    [
        {"model_revision": "2"},
        {"model_revision": None, "unpinned_model": True},
        {"extra_body": {"repetition_penalty": 1.1}},
        {"reasoning_parser": "server"},
        {"chat": "never"},
    ],
)
def test_what_decides_answers_makes_another_spec(served: OpenAIServer, changes: dict[str, Any]) -> None:
    assert spec(served, **changes).hash != spec(served).hash


@pytest.mark.parametrize("fact", [{"root": "/models/demo-2"}, {"max_model_len": 1024}])
def test_another_model_under_the_same_name_makes_another_spec(
    served: OpenAIServer, fact: dict[str, Any]
) -> None:
    with openai_server(facts={**served.facts, **fact}) as changed:
        (told,) = spec(changed).changes_from(spec(served))
    assert told.startswith('model was "demo (endpoint:')


def test_a_named_model_replaces_the_config_s(served: OpenAIServer) -> None:
    assert engine_config(served.config(), "another")["model"] == "another"


def test_the_model_of_an_endpoint_is_no_name_of_a_registry_or_a_directory() -> None:
    config = {"endpoint": "https://host/v1", "model": "models:/name@champion"}
    assert engine_config(config, None) == config


def test_a_model_that_is_loaded_here_cannot_be_unpinned() -> None:
    with pytest.raises(JobError, match="unpinned-model is for a model that an endpoint serves"):
        engine_config({"model": "a-model"}, None, unpinned_model=True)
    pinned = engine_config({"endpoint": "https://host/v1", "model": "m"}, None, unpinned_model=True)
    assert pinned["unpinned_model"] is True
