"""What the check before a job finds out about an endpoint, and says by name."""

import json
from typing import Any

import pytest
from aiohttp import web

from pipemax.endpoint_config import EndpointConfig
from pipemax.endpoints.survey import survey
from pipemax.serve.preflight_checks import preflight
from pipemax.wire import GenerationSpec, PreflightReply, PreflightRequest
from tests.endpoints.openai_server import OPENAI, OpenAIServer, openai_server

SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"size": {"type": "integer"}},
        "required": ["size"],
        "additionalProperties": False,
    }
)
GUIDED = frozenset({"chat", "completions", "guided", "logprobs"})
CHAT_ONLY = frozenset({"chat"})
OF_SOMEBODY: dict[str, Any] = {"can": OPENAI, "facts": {"owned_by": "somebody"}}


def check(
    server: OpenAIServer,
    *,
    prompts: tuple[str, ...] = (),
    engine: dict[str, Any] | None = None,
    **settings: Any,
) -> PreflightReply:
    rows = [{"prompt": prompt} for prompt in prompts]
    return preflight(
        PreflightRequest(
            engine=server.config(**(engine or {})), generation=GenerationSpec(**settings), requests=rows
        )
    )


def facts(server: OpenAIServer, **settings: Any) -> dict[str, Any]:
    reply = check(server, **settings)
    assert reply.error == ""
    found: dict[str, Any] = reply.engine_settings["server"]
    return found


def test_a_plain_job_asks_two_requests_and_learns_what_is_served() -> None:
    with openai_server(answers_as="demo-2026-11") as server:
        found = facts(server)
        assert server.requests["/chat/completions"] == 2
    assert found["kind"] == "vllm"
    assert found["models"] == [{"id": "demo", "root": "/models/demo", "max_model_len": 512}]
    assert found["answers_as"] == "demo-2026-11"


def test_a_server_that_answers_under_changing_names_is_not_held_to_one() -> None:
    names = iter(["a", "b", "c"])

    def renamed(path: str, body: dict[str, Any]) -> None:
        server.answers_as = next(names) if path == "/chat/completions" else None

    with openai_server(early=renamed) as server:
        assert facts(server)["answers_as"] is None


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, "structured_outputs"),
        ({"can": GUIDED}, "guided_choice"),
        (OF_SOMEBODY, "schema"),
        ({"can": frozenset({"chat", "json_object"}), "facts": {"owned_by": "me"}}, "schema"),
    ],
)
def test_choices_are_asked_for_as_the_server_follows_them(fields: dict[str, Any], expected: str) -> None:
    with openai_server(**fields) as server:
        assert facts(server, choice=("bug", "praise"))["choice_by"] == expected


def test_a_server_that_takes_schemas_by_another_name_is_asked_by_that_name() -> None:
    with openai_server(can=frozenset({"chat", "json_object"}), facts={"owned_by": "me"}) as server:
        assert facts(server, response_format=SCHEMA)["schema_by"] == "json_object"
        assert server.bodies[-1]["response_format"]["schema"] == json.loads(SCHEMA)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"response_format": SCHEMA}, "response_format is given, and this server follows none"),
        ({"choice": ("bug", "praise")}, "choice is given, and this server follows none"),
        ({"regex": "[a-c]{3}"}, "regex is given, and this server follows none"),
        ({"grammar": 'root ::= "a"'}, "grammar is given, and this server follows none"),
        ({"logprobs": True}, "logprobs are given, and endpoint http://127.0.0.1:"),
        ({"top_k": 4}, "top_k is given"),
    ],
)
def test_what_a_server_ignores_in_silence_is_refused_by_name(settings: dict[str, Any], named: str) -> None:
    with openai_server(can=CHAT_ONLY, facts={}) as server:
        assert named in check(server, **settings).error


def test_a_setting_that_the_server_refuses_is_named_with_what_it_says() -> None:
    with openai_server(refuses={"seed": "seed is not supported"}) as server:
        error = check(server, seed=3).error
    assert "refuses the job's settings: 400: seed is not supported" in error
    assert '"seed": 3' in error


def test_an_answer_that_does_not_fit_the_jobs_own_schema_is_an_error() -> None:
    """A server may take simple schemas, and fall back to any JSON for others."""

    def falls_back(path: str, body: dict[str, Any]) -> web.Response | None:
        form = body.get("response_format") or {}
        if "size" not in str(form):
            return None
        choice = {"message": {"content": '{"any": 1}'}, "finish_reason": "stop"}
        return web.json_response({"model": "demo", "choices": [choice]})

    with openai_server(early=falls_back) as server:
        error = check(server, response_format=SCHEMA).error
    assert "does not follow response_format" in error
    assert '{"any": 1}' in error


def test_the_newer_name_of_max_tokens_is_found_by_the_refusal() -> None:
    refusal = {"max_tokens": "Unsupported parameter: 'max_tokens'. Use 'max_completion_tokens' instead."}
    with openai_server(**OF_SOMEBODY, refuses=refusal) as server:
        assert facts(server)["max_tokens_name"] == "max_completion_tokens"
        assert "max_tokens" not in server.bodies[-1]


def test_thinking_that_takes_the_few_tokens_gets_more() -> None:
    def thinks(prompt: str) -> str:
        return "<think>" + "hm " * 100 + "</think>" + prompt

    with openai_server(answer=thinks) as server:
        assert facts(server, reasoning_effort="low", engine={"reasoning_parser": "think_tags"})
        assert {body["max_tokens"] for body in server.bodies} > {2_048}


def test_a_model_that_is_not_served_is_named_with_those_that_are() -> None:
    with openai_server() as server:
        reply = preflight(
            PreflightRequest(engine=server.config() | {"model": "other"}, generation=GenerationSpec())
        )
    assert "serves no model 'other'; it serves 'demo'" in reply.error


def test_addresses_with_different_models_are_both_named() -> None:
    facts_of_other = {"owned_by": "vllm", "root": "/models/demo", "max_model_len": 1024}
    with openai_server() as one, openai_server(facts=facts_of_other) as other:
        reply = check(one, engine={"endpoint": [one.url, other.url]})
        assert f"127.0.0.1:{one.port}" in reply.error
        assert f"127.0.0.1:{other.port}" in reply.error
    assert "serve different models" in reply.error
    assert "1024" in reply.error


def test_addresses_that_can_different_things_are_both_named() -> None:
    with openai_server() as one, openai_server(can=GUIDED) as other:
        reply = check(one, engine={"endpoint": [one.url, other.url]}, choice=("a", "b"))
        assert f"127.0.0.1:{other.port}" in reply.error
    assert "schema_by" in reply.error


def test_addresses_that_answer_under_two_names_are_both_named() -> None:
    with openai_server(answers_as="m-1") as one, openai_server(answers_as="m-2") as other:
        reply = check(one, engine={"endpoint": [one.url, other.url]})
    assert "answer as different models" in reply.error
    assert "'m-2'" in reply.error


def test_each_of_two_equal_addresses_is_asked() -> None:
    with openai_server() as one, openai_server() as other:
        assert check(one, engine={"endpoint": [one.url, other.url]}).error == ""
        assert other.requests["/chat/completions"] == one.requests["/chat/completions"] == 2


def test_a_busy_server_is_asked_again() -> None:
    refusals = iter([429, 503])

    def busy(path: str, body: dict[str, Any]) -> web.Response | None:
        status = next(refusals, None) if path == "/chat/completions" else None
        return None if status is None else web.Response(status=status, headers={"Retry-After": "0"})

    with openai_server(early=busy) as server:
        assert check(server).error == ""


def test_a_server_that_is_not_there_is_named() -> None:
    with openai_server() as server:
        config = server.config()
    reply = preflight(PreflightRequest(engine=config, generation=GenerationSpec()))
    assert "does not answer" in reply.error
    assert "127.0.0.1" in reply.error


def test_a_wrong_key_ends_the_check_and_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENDPOINT_KEY", "sk-wrong")
    with openai_server(key="sk-right") as server:
        error = check(server, engine={"api_key_env": "ENDPOINT_KEY"}).error
    assert "refuses the key (ENDPOINT_KEY): 401" in error
    assert "sk-wrong" not in error


def test_images_are_refused_where_the_model_takes_none() -> None:
    def no_images(path: str, body: dict[str, Any]) -> web.Response | None:
        if "image_url" not in str(body):
            return None
        return web.json_response({"error": {"message": "demo is not a multimodal model"}}, status=400)

    with openai_server(early=no_images) as server:
        request = PreflightRequest(engine=server.config(), generation=GenerationSpec(), has_images=True)
        assert "takes none: 400: demo is not a multimodal model" in preflight(request).error


def test_embeddings_are_asked_for_once_and_missing_ones_are_said() -> None:
    with openai_server(can=frozenset({"embeddings"})) as server:
        assert check(server, task="embed", engine={"task": "embed"}).error == ""
        cut = check(server, task="embed", dimensions=2, engine={"task": "embed"})
        assert cut.error == ""
        error = check(server, task="score", engine={"task": "score"}).error
    assert "cannot do it (/score)" in error
    assert "--runner pooling" in error


def test_a_served_model_that_does_not_generate_is_told_to_need_its_task() -> None:
    with openai_server(can=frozenset({"embeddings"})) as server:
        assert "if that embeds, classifies or scores, name the task" in check(server).error


def test_dimensions_that_the_server_ignores_are_refused() -> None:
    def ignores(path: str, body: dict[str, Any]) -> None:
        body.pop("dimensions", None)

    with openai_server(can=frozenset({"embeddings"}), early=ignores) as server:
        error = check(server, task="embed", dimensions=2, engine={"task": "embed"}).error
    assert "returns 3 whatever is asked for" in error


def test_prompts_are_counted_by_the_server_and_shown_as_its_model_sees_them() -> None:
    with openai_server() as server:
        reply = check(server, prompts=("abcd", "abxyz", " "), max_tokens=7)
    assert reply.prompt_tokens == [4, 5, 0]
    assert reply.output_tokens == [7, 7, 0]
    assert reply.shared_prefix_tokens == 2
    assert (reply.first_prompt, reply.token_note, reply.max_model_len) == ("abcd", "", 512)
    assert reply.versions["vllm"] == "0.32.0"


def test_prompts_that_are_too_long_count_as_errors() -> None:
    with openai_server() as server:
        assert check(server, prompts=("a" * 600, "b")).prompt_tokens == [0, 1]


def test_tokens_that_nobody_counts_are_estimated_and_said_to_be() -> None:
    with openai_server(**OF_SOMEBODY) as server:
        reply = check(server, prompts=("four" * 100, ""))
    assert reply.prompt_tokens[1] == 0
    assert 100 <= reply.prompt_tokens[0] <= 110
    assert "estimated from characters" in reply.token_note
    assert reply.max_model_len == 0


def test_the_survey_tries_everything_and_says_why_not() -> None:
    with openai_server(**OF_SOMEBODY) as server:
        (seen,) = survey(EndpointConfig.parse(server.config()))
    assert seen.fault is None
    assert seen.found["choices"] == "yes, by schema"
    assert seen.found["completions"] == "no"
    assert "Unrecognized request argument supplied: guided_regex" in seen.found["regular expressions"]
    assert "requests" in seen.found["asked"]


def test_the_survey_of_one_dead_address_of_two_tells_of_both() -> None:
    with openai_server() as server:
        with openai_server() as dead:
            config = server.config(endpoint=[server.url, dead.url])
        alive, gone = survey(EndpointConfig.parse(config))
    assert alive.fault is None
    assert gone.fault is not None
    assert "does not answer" in gone.fault
