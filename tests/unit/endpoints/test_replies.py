"""What servers answer, as they write it: vLLM, llama.cpp, OpenAI and Azure."""

import json

import pytest

from pipemax.endpoint_config import EndpointConfig, ServerFacts
from pipemax.endpoints.replies import UnreadableError, pooled_of, refusal_of, reply_of
from pipemax.generation import Sampling
from pipemax.wire import ErrorCode

_USAGE = {"prompt_tokens": 7, "completion_tokens": 5}
_SERVER = ServerFacts.model_validate({})


def _config(**values: object) -> EndpointConfig:
    return EndpointConfig.parse(
        {"endpoint": "http://127.0.0.1/v1", "model": "m", "unpinned_model": True, **values}
    )


def _chat(reason: str = "stop", **message: object) -> dict[str, object]:
    return {"choices": [{"message": message, "finish_reason": reason}], "usage": _USAGE}


def test_a_chat_answer_has_its_text_its_end_and_its_counts() -> None:
    reply = reply_of(_chat("length", content="Hi"), Sampling(), _config(), _SERVER)
    assert (reply.text, reply.finish_reason, reply.prompt_tokens, reply.num_tokens) == ("Hi", "length", 7, 5)


def test_a_completion_has_its_text() -> None:
    values = {"choices": [{"text": " there", "finish_reason": "stop"}], "usage": _USAGE}
    assert reply_of(values, Sampling(), _config(), _SERVER).text == " there"


@pytest.mark.parametrize(
    "values",
    [
        {},
        [],
        "text",
        {"choices": []},
        {"choices": [{"finish_reason": "stop"}]},
        {"choices": [{"message": {"content": "cut off in mid-stream"}}]},
        {"choices": [{"message": {"content": 7}, "finish_reason": "stop"}]},
        {"error": {"message": "with status 200"}},
    ],
)
def test_a_body_that_is_no_answer_is_unreadable(values: object) -> None:
    with pytest.raises(UnreadableError):
        reply_of(values, Sampling(), _config(), _SERVER)


@pytest.mark.parametrize(
    "values", [_chat("content_filter", content=None), _chat(content=None, refusal="I cannot")]
)
def test_a_withheld_answer_is_the_rows_content_filter_error(values: dict[str, object]) -> None:
    error = reply_of(values, Sampling(), _config(), _SERVER).error
    assert error is not None
    assert error.code == ErrorCode.CONTENT_FILTER


@pytest.mark.parametrize("field", ["reasoning", "reasoning_content"])
def test_thinking_is_taken_from_the_servers_field(field: str) -> None:
    values = _chat(content="42", **{field: "6 times 7"})
    reply = reply_of(values, Sampling(), _config(reasoning_parser="server"), _SERVER)
    assert (reply.text, reply.reasoning) == ("42", "6 times 7")


@pytest.mark.parametrize(
    ("text", "reasoning", "answer"),
    [
        ("<think>\n6 times 7\n</think>\n\n42", "6 times 7", "42"),
        ("6 times 7\n</think>42", "6 times 7", "42"),
        ("42", None, "42"),
        ("<think>cut", "cut", ""),
    ],
)
def test_thinking_is_split_off_at_its_tags(text: str, reasoning: str | None, answer: str) -> None:
    reply = reply_of(_chat(content=text), Sampling(), _config(reasoning_parser="think_tags"), _SERVER)
    assert (reply.text, reply.reasoning) == (answer, reasoning)


def test_tags_stay_where_nobody_asked_for_a_split() -> None:
    text = "<think>a</think>b"
    assert reply_of(_chat(content=text), Sampling(), _config(), _SERVER).text == text


def test_a_choice_is_taken_out_of_its_object() -> None:
    sampling = Sampling(choice=("ham", "spam"))
    assert reply_of(_chat(content='{"answer": "ham"}'), sampling, _config(), _SERVER).text == "ham"


@pytest.mark.parametrize(
    ("status", "body", "code"),
    [
        (400, {"error": {"message": "bad", "type": "invalid_request_error"}}, ErrorCode.ENGINE_ERROR),
        (400, {"error": {"code": "context_length_exceeded", "message": "long"}}, ErrorCode.PROMPT_TOO_LONG),
        (400, {"error": {"param": "input_tokens", "message": "at least 513"}}, ErrorCode.PROMPT_TOO_LONG),
        (413, {"error": "too large"}, ErrorCode.PROMPT_TOO_LONG),
        (400, {"error": {"code": "content_filter", "message": "hate"}}, ErrorCode.CONTENT_FILTER),
        (422, {"detail": "Unprocessable"}, ErrorCode.ENGINE_ERROR),
    ],
)
def test_a_refused_row_has_the_code_of_its_reason(status: int, body: object, code: ErrorCode) -> None:
    assert refusal_of(status, json.dumps(body)).code == code


def test_embeddings_classes_and_scores_are_read() -> None:
    embedded = pooled_of({"data": [{"embedding": [0.5, 1.0]}], "usage": _USAGE}, "1", "embed")
    assert embedded.embedding is not None
    assert len(embedded.embedding) == 8
    assert embedded.prompt_tokens == 7
    classified = pooled_of({"data": [{"label": "ham", "probs": [0.25, 0.75]}]}, "1", "classify")
    assert (classified.label, classified.probability) == ("ham", 0.75)
    assert pooled_of({"data": [{"score": 0.125}]}, "1", "score").score == 0.125
    assert pooled_of({"data": [{"score": float("nan")}]}, "1", "score").error is not None
    with pytest.raises(UnreadableError):
        pooled_of({"data": [{}]}, "1", "score")
