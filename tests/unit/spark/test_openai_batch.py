"""Lines of OpenAI's batch files become rows, and annotated rows lines of its output files."""

import json
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion

from pipemax_spark.executor.conversations import FIELDS
from pipemax_spark.executor.openai_batch import CHAT, TEXT, TEXT_FIELD, parsed_lines
from pipemax_spark.storage.openai_batch import output_line


def line(body: dict[str, Any], *, url: str = CHAT, custom_id: object = "a") -> str:
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body})


def parsed(*lines: str) -> list[dict[str, Any]]:
    (batch,) = parsed_lines(iter([pa.RecordBatch.from_pydict({"value": list(lines)})]))
    rows: list[dict[str, Any]] = batch.to_pylist()
    return rows


def chat(text: str = "Hi", **settings: Any) -> dict[str, Any]:
    return {"model": "any", "messages": [{"role": "user", "content": text}], **settings}


def test_a_request_is_a_row_with_its_own_sampling() -> None:
    (row,) = parsed(line(chat(max_completion_tokens=7, temperature=0, seed=3, stop="END", user="u", n=1)), "")
    assert row["custom_id"] == "a"
    assert row["messages"] == [
        {"role": "user", "content": [{"text": "Hi", "image_url": None}], TEXT_FIELD: "Hi", FIELDS: None}
    ]
    own = {name: value for name, value in row["overrides"].items() if value is not None}
    assert own == {"max_tokens": 7, "temperature": 0.0, "seed": 3, "stop": ["END"]}
    assert (row["fault"], row["row_fault"], row["has_image"], row["has_fields"]) == (None, None, False, False)


def test_without_a_temperature_it_is_openai_s() -> None:
    (row, text) = parsed(line(chat()), line({"prompt": "Once"}, url=TEXT, custom_id="b"))
    assert row["overrides"]["temperature"] == 1.0
    assert row["overrides"]["max_tokens"] is None
    assert (text["prompt"], text["messages"], text["overrides"]["max_tokens"]) == ("Once", None, 16)


def test_parts_may_be_images() -> None:
    parts = [
        {"type": "text", "text": "What?"},
        {"type": "image_url", "image_url": {"url": "data:,x", "detail": "low"}},
    ]
    (row,) = parsed(line({"messages": [{"role": "user", "content": parts}]}))
    assert row["has_image"]
    assert row["messages"][0]["content"] == [
        {"text": "What?", "image_url": None},
        {"text": None, "image_url": "data:,x"},
    ]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "is not JSON"),
        ("[]", "no custom_id"),
        (line(chat(), custom_id=""), "no custom_id"),
        (line(chat(), url="/v1/embeddings"), "url is '/v1/embeddings'"),
        (line(chat(), custom_id="x").replace("POST", "GET"), "request 'x': method is 'GET'"),
        (line(chat(n=3)), "only the whole job can say it (--n)"),
        (line(chat(response_format={"type": "json_object"})), "--response-format"),
        (line(chat(tools=[{}])), "parameter 'tools'"),
        (line(chat(tools=[{}], tool_choice="none")), "parameter 'tools'"),
        (line(chat(logit_bias={"5": 1})), "parameter 'logit_bias' is {'5': 1}, which is not supported"),
        ("[" * 20_000, "nested too deeply"),
        (line({"messages": []}), "a list that is not empty"),
        (line({"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}), "input_audio"),
        (line({"prompt": ["a"]}, url=TEXT), "prompt must be one text"),
    ],
)
def test_a_line_that_cannot_be_a_row_says_why(text: str, says: str) -> None:
    (row,) = parsed(text)
    assert says in row["fault"]


def row_fault(text: str | bytes) -> tuple[str, str, str]:
    """Id, code and message of a line that is a row's error."""
    (batch,) = parsed_lines(iter([pa.RecordBatch.from_arrays([lines_of_bytes(text)], ["value"])]))
    (row,) = batch.to_pylist()
    assert row["fault"] is None
    assert row["row_fault"] is not None
    return row["custom_id"], row["row_fault"]["code"], row["row_fault"]["message"]


def lines_of_bytes(text: str | bytes) -> pa.Array:
    """A column of text as Spark hands it over, which may hold any bytes."""
    content = text if isinstance(text, bytes) else text.encode()
    return pa.Array.from_buffers(pa.string(), 1, pa.array([content], pa.binary()).buffers())


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"temperature": "hot"}, "temperature is 'hot', not a number"),
        ({"max_tokens": True}, "max_tokens is True, not a whole number"),
        ({"max_tokens": 2_147_483_648}, "max_tokens is 2147483648, must be at least"),
        ({"max_completion_tokens": 4_294_967_299}, "max_completion_tokens is 4294967299, must be"),
        ({"max_tokens": [8]}, "max_tokens is [8], not a whole number"),
        ({"max_tokens": 4.5}, "max_tokens is 4.5, not a whole number"),
        ({"top_p": {}}, "top_p is {}, not a number"),
        ({"seed": "x"}, "seed is 'x', not a whole number"),
        ({"stop": [1]}, "stop is [1], not a text"),
        ({"stop": {"a": 1}}, "stop is {'a': 1}, not a text"),
    ],
)
def test_a_setting_that_does_not_fit_is_its_row_s_error(settings: dict[str, Any], says: str) -> None:
    custom_id, code, message = row_fault(line(chat(**settings)))
    assert (custom_id, code) == ("a", "invalid_parameter")
    assert says in message


@pytest.mark.parametrize("digits", ["1" * 5_000, "1e999", "NaN", "-Infinity"])
def test_a_number_that_python_cannot_hold_is_its_row_s_error(digits: str) -> None:
    text = line(chat(max_tokens=7)).replace('"max_tokens": 7', f'"max_tokens": {digits}')
    custom_id, code, message = row_fault(text)
    assert (custom_id, code) == ("a", "invalid_parameter")
    assert message.startswith("max_tokens is ")
    assert len(message) < 200


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (line(chat("X")).encode().replace(b"X", b"\xff"), "not UTF-8: invalid start byte at byte"),
        (line(chat("X")).replace('"X"', "[" * 20_000), "nested too deeply"),
        (
            line({"messages": [{"role": "user", "content": "x", "n": float("nan")}]}),
            "the field 'n' of a message",
        ),
    ],
)
def test_what_cannot_be_read_is_an_error_of_the_row_with_its_id(text: str | bytes, says: str) -> None:
    custom_id, code, message = row_fault(text)
    assert (custom_id, code) == ("a", "invalid_prompt")
    assert says in message


def test_a_lone_surrogate_becomes_a_question_mark_but_in_an_id() -> None:
    turns = [{"role": "user", "content": "half \ud83c", "name": "\ud83c"}]
    (row,) = parsed(line({"messages": turns, "stop": "\udc00"}))
    (message,) = row["messages"]
    assert (row["fault"], row["row_fault"]) == (None, None)
    assert (message["content"][0]["text"], message[FIELDS]) == ("half ?", '{"name": "?"}')
    assert row["overrides"]["stop"] == ["?"]
    custom_id, code, told = row_fault(line(chat(), custom_id="r\ud83c"))
    assert (custom_id, code) == ("r\\ud83c", "invalid_prompt")
    assert "custom_id holds a lone surrogate" in told


def test_whole_numbers_may_be_written_with_a_point() -> None:
    (row,) = parsed(line(chat(max_tokens=4.0, top_k=-1, temperature="0.5")))
    assert (row["overrides"]["max_tokens"], row["overrides"]["top_k"]) == (4, 0)
    assert row["overrides"]["temperature"] == 0.5


def test_the_parameter_for_completions_comes_before_the_older_one() -> None:
    (row,) = parsed(line(chat(max_tokens=7, max_completion_tokens=0)))
    assert row["overrides"]["max_tokens"] == 0, "the engine's side refuses it"


OFF = {
    "logit_bias": {},
    "tool_choice": "none",
    "tools": [],
    "functions": [],
    "function_call": "none",
    "parallel_tool_calls": False,
    "stream": False,
    "stream_options": None,
    "n": 1,
    "best_of": 1,
    "logprobs": False,
    "top_logprobs": 0,
    "echo": False,
    "suffix": "",
    "modalities": ["text"],
    "audio": None,
    "prediction": None,
    "web_search_options": None,
    "response_format": {"type": "text"},
    "user": "me",
    "metadata": {"a": "b"},
    "store": True,
    "service_tier": "auto",
    "verbosity": "medium",
    "bad_words": [],
    "stop_token_ids": [],
    "stop": None,
    "seed": None,
}


@pytest.mark.parametrize("name", OFF)
def test_a_parameter_that_is_off_changes_nothing(name: str) -> None:
    (row,), (without,) = parsed(line(chat(**{name: OFF[name]}))), parsed(line(chat()))
    assert row == without


def test_further_fields_of_messages_travel() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"town": "Oslo"}'}}
    turns = [
        {"role": "user", "content": "Weather?", "refusal": None, "annotations": []},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "rain"},
    ]
    (row,) = parsed(line({"messages": turns}))
    assert row["has_fields"]
    fields = [message[FIELDS] and json.loads(message[FIELDS]) for message in row["messages"]]
    assert fields == [None, {"tool_calls": [call]}, {"tool_call_id": "c1"}]
    assert row["messages"][1]["content"] == []


def annotation(**changes: Any) -> dict[str, Any]:
    good = {
        "text": "Hello",
        "finish_reason": "stop",
        "prompt_tokens": 3,
        "completion_tokens": 2,
        "error": None,
    }
    return {**good, "completed_at": datetime(2026, 1, 2, tzinfo=UTC), **changes}


def test_an_answer_is_what_openai_s_client_reads() -> None:
    row = {"custom_id": "a", "url": CHAT, "annotation": annotation(samples=["Hello", "Hi"], reasoning="hm")}
    written = json.loads(output_line(row, model="m"))
    assert (written["custom_id"], written["response"]["status_code"], written["error"]) == ("a", 200, None)
    read = ChatCompletion.model_validate(written["response"]["body"])
    assert [choice.message.content for choice in read.choices] == ["Hello", "Hi"]
    assert read.usage is not None
    assert read.usage.total_tokens == 5
    of_text = json.loads(output_line(row | {"url": TEXT}, model="m"))["response"]["body"]
    assert [choice.text for choice in Completion.model_validate(of_text).choices] == ["Hello", "Hi"]


@pytest.mark.parametrize(("code", "status"), [("prompt_too_long", 400), ("engine_died", 500)])
def test_an_error_has_a_status_and_its_code(code: str, status: int) -> None:
    row = {"custom_id": "a", "url": CHAT, "annotation": annotation(error={"code": code, "message": "why"})}
    response = json.loads(output_line(row, model="m"))["response"]
    assert (response["status_code"], response["body"]["error"]["code"]) == (status, code)
