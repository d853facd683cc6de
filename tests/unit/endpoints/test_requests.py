"""The bodies of requests, by whose server it is."""

from typing import Any

import pytest

from pipemax.answers.asks import Ask, Prompt
from pipemax.endpoint_config import EndpointConfig, ServerFacts
from pipemax.endpoints.requests import generation_body, unknown_setting
from pipemax.generation import GenerationRequest, Sampling

CONFIG = EndpointConfig.parse({"endpoint": "https://host/v1", "model": "m", "unpinned_model": True})


def body_of(sampling: Sampling, kind: str) -> dict[str, Any]:
    request = GenerationRequest(request_id="1", prompt="Hi", sampling=sampling)
    ask = Ask(ask_id="1", prompt=Prompt((), request), sampling=sampling, seed=sampling.seed)
    return generation_body(ask, CONFIG, ServerFacts.model_validate({"kind": kind})).values


def test_llama_cpp_samples_by_the_rows_settings_and_not_by_its_own_defaults() -> None:
    """It would take temperature 0.8, top_p 0.95, top_k 40, min_p 0.05 and in one of its servers repeat_penalty 1.1."""
    sent = body_of(Sampling(temperature=1.0), "llama.cpp")
    settings = ("temperature", "top_p", "top_k", "min_p", "repeat_penalty")
    assert [sent[name] for name in settings] == [1.0, 1.0, 0, 0.0, 1.0]
    few = body_of(Sampling(temperature=1.5, top_k=5, min_p=0.1), "llama.cpp")
    assert [few[name] for name in settings] == [1.5, 1.0, 5, 0.1, 1.0]


@pytest.mark.parametrize("settings", [{"top_k": 5}, {"min_p": 0.1}])
def test_settings_beyond_openais_are_for_servers_that_have_them(settings: dict[str, Any]) -> None:
    (name,) = settings
    faults = [
        unknown_setting(Sampling(**settings), CONFIG, ServerFacts.model_validate({"kind": kind}))
        for kind in ("vllm", "llama.cpp", "other")
    ]
    assert faults[:2] == [None, None]
    assert f"{name} is given, which is no part of OpenAI's API" in str(faults[2])
    assert {name, "top_k", "min_p", "repeat_penalty"}.isdisjoint(body_of(Sampling(), "other"))


def test_llama_cpps_penalty_of_repetition_is_another_one() -> None:
    server = ServerFacts.model_validate({"kind": "llama.cpp"})
    assert "repetition_penalty" in str(unknown_setting(Sampling(repetition_penalty=1.5), CONFIG, server))
