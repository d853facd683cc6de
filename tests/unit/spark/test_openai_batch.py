"""Lines of OpenAI's batch files become rows, and annotated rows lines of its output files."""

import json
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
import pytest
from openai.types.chat import ChatCompletion

from pipemax.openai_batch import CHAT, TEXT
from pipemax_spark.executor.openai_batch import output_line, parsed_lines


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
    assert row["messages"] == [{"role": "user", "content": [{"text": "Hi", "image_url": None}]}]
    own = {name: value for name, value in row["overrides"].items() if value is not None}
    assert own == {"max_tokens": 7, "temperature": 0.0, "seed": 3, "stop": ["END"]}
    assert (row["fault"], row["has_image"]) == (None, False)


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
        (line(chat(temperature="hot")), "temperature is 'hot'"),
        (line(chat(max_tokens=True)), "max_tokens is True"),
        (line(chat(stop=[1])), "stop is [1]"),
        (line({"messages": []}), "a list that is not empty"),
        (line({"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}), "input_audio"),
        (line({"prompt": ["a"]}, url=TEXT), "prompt must be one text"),
    ],
)
def test_a_line_that_cannot_be_a_row_says_why(text: str, says: str) -> None:
    (row,) = parsed(text)
    assert says in row["fault"]


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


@pytest.mark.parametrize(("code", "status"), [("prompt_too_long", 400), ("engine_died", 500)])
def test_an_error_has_a_status_and_its_code(code: str, status: int) -> None:
    row = {"custom_id": "a", "url": CHAT, "annotation": annotation(error={"code": code, "message": "why"})}
    response = json.loads(output_line(row, model="m"))["response"]
    assert (response["status_code"], response["body"]["error"]["code"]) == (status, code)
