"""In a row with images vLLM's own renderer writes the prompt: what it would drop of a message is the row's error."""

import json
from typing import Any

import pytest

from pipemax.generation import GenerationRequest, Image, Message
from pipemax.vllm_ext.engine.row_encoder import _conversation, _fault_of_fields

CALLS = [{"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}]


def request(role: str, **fields: Any) -> GenerationRequest:
    photo = Message(role="user", content=(Image(content=b"x"), "what?"))
    return GenerationRequest(
        request_id="0", messages=(photo, Message(role=role, content="x", fields=json.dumps(fields)))
    )


@pytest.mark.parametrize(
    ("role", "fields"),
    [
        ("assistant", {"tool_calls": CALLS}),
        ("assistant", {"reasoning": "r"}),
        ("tool", {"tool_call_id": "c"}),
        ("user", {"name": "Ada"}),
    ],
)
def test_what_the_renderer_passes_on_is_passed_on(role: str, fields: dict[str, Any]) -> None:
    one = request(role, **fields)
    assert _fault_of_fields(one) is None
    _, turn = _conversation(one, [None])  # type: ignore[list-item] # a loaded image, which nobody opens here
    assert fields.keys() <= turn.keys()
    if "tool_calls" in fields:
        assert turn["tool_calls"][0]["function"]["arguments"] == {"a": 1}


@pytest.mark.parametrize(
    ("role", "fields"),
    [
        ("user", {"tool_calls": CALLS}),
        ("assistant", {"tool_call_id": "c"}),
        ("user", {"name": 3}),
        ("user", {"weight": 1}),
    ],
)
def test_what_the_renderer_would_drop_is_the_row_s_error_by_name(role: str, fields: dict[str, Any]) -> None:
    fault = _fault_of_fields(request(role, **fields))
    assert fault is not None
    assert fault.code == "invalid_prompt"
    assert repr(next(iter(fields))) in fault.message
