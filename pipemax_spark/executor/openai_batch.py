"""Read the lines of OpenAI's batch files into rows, and write rows as lines of its output files.

A line is a request (custom_id, url, body); what a row can say of itself goes into its overrides, and what only a whole
job can say is a fault of the line. The format: OpenAI's Batch API, for ``/v1/chat/completions`` and
``/v1/completions``.
``pipemax.cli.batch_file`` reads the same files without Spark, where a request may have more settings of its own.
"""

import json
from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any

import pyarrow as pa

from pipemax.wire import OVERRIDES_TYPE

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
LINE_COLUMN = "value"
"""Spark's name for the lines of text files."""
_PART = pa.struct([("text", pa.string()), ("image_url", pa.string())])
_MESSAGE = pa.struct([("role", pa.string()), ("content", pa.list_(_PART))])
PARSED_SCHEMA = pa.schema(
    [
        ("custom_id", pa.string()),
        ("url", pa.string()),
        ("messages", pa.list_(_MESSAGE)),
        ("prompt", pa.string()),
        ("overrides", OVERRIDES_TYPE),
        ("fault", pa.string()),
        ("has_image", pa.bool_()),
    ]
)
_OWN = ("temperature", "top_p", "top_k", "seed")
_READ = {*_OWN, "model", "messages", "prompt", "max_tokens", "max_completion_tokens", "stop"}
_WITHOUT_EFFECT = {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"}
_OFF: dict[str, tuple[Any, ...]] = {
    "stream": (False,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "echo": (False,),
    "logprobs": (False, 0),
    "tools": ([],),
    "n": (1,),
    "response_format": ({"type": "text"},),
}
"""Parameters that are accepted only with a value that turns them off."""
_OF_THE_JOB = {
    *(
        "response_format",
        "n",
        "reasoning_effort",
        "chat_template_kwargs",
        "regex",
        "grammar",
        "choice",
        "logprobs",
    )
}
_OPENAI_TEMPERATURE = 1.0
_OPENAI_TEXT_TOKENS = 16


class _FaultError(ValueError):
    """A line that cannot be a row."""


def parsed_lines(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Turn batches of lines into rows of ``PARSED_SCHEMA``, without blank lines; the function of ``mapInArrow``."""
    for batch in batches:
        lines = [line for line in batch.column(LINE_COLUMN).to_pylist() if line and line.strip()]
        yield pa.RecordBatch.from_pylist([_row(line) for line in lines], schema=PARSED_SCHEMA)


def _row(line: str) -> dict[str, Any]:
    row: dict[str, Any] = dict.fromkeys(PARSED_SCHEMA.names)
    try:
        values = json.loads(line)
        custom_id = values.get("custom_id") if isinstance(values, dict) else None
        if not isinstance(custom_id, str) or not custom_id:
            raise _FaultError(f"a line has no custom_id: {line[:80]!r}")
        row["custom_id"] = custom_id
        row |= _request(values)
    except _FaultError as fault:
        row["fault"] = str(fault) if row["custom_id"] is None else f"request {row['custom_id']!r}: {fault}"
    except ValueError:
        row["fault"] = f"a line is not JSON: {line[:80]!r}"
    return row


def _request(values: Mapping[str, Any]) -> dict[str, Any]:
    url, body = values.get("url", CHAT), values.get("body")
    if url not in (CHAT, TEXT):
        raise _FaultError(f"url is {url!r}; {CHAT} and {TEXT} are supported")
    if values.get("method", "POST") != "POST":
        raise _FaultError(f"method is {values['method']!r}; it must be 'POST'")
    if not isinstance(body, dict):
        raise _FaultError("body is missing or not an object")
    _check_parameters(body)
    row: dict[str, Any] = {"url": url, "overrides": _overrides(body, is_chat=url == CHAT), "has_image": False}
    if url == TEXT:
        if not isinstance(body.get("prompt"), str):
            raise _FaultError("prompt must be one text")
        return row | {"prompt": body["prompt"]}
    given = body.get("messages")
    if not isinstance(given, list) or not given:
        raise _FaultError("messages must be a list that is not empty")
    messages = [_message(message) for message in given]
    has_image = any(part["image_url"] is not None for message in messages for part in message["content"])
    return row | {"messages": messages, "has_image": has_image}


def _check_parameters(body: Mapping[str, Any]) -> None:
    for name, value in body.items():
        if name in _READ | _WITHOUT_EFFECT or value is None or value in _OFF.get(name, ()):
            continue
        if name in _OF_THE_JOB:
            raise _FaultError(
                f"{name} is {value!r}: only the whole job can say it (--{name.replace('_', '-')}); pipemax run-batch "
                "takes it per request"
            )
        raise _FaultError(f"parameter {name!r} is {value!r}, which is not supported; leave it out")


def _message(given: Any) -> dict[str, Any]:
    if not isinstance(given, dict) or not isinstance(given.get("role"), str):
        raise _FaultError(f"message {given!r} has no role")
    content = given.get("content")
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(parts, list):
        raise _FaultError(f"the content of message {given!r} is neither text nor parts")
    return {"role": given["role"], "content": [_part(part) for part in parts]}


def _part(part: Any) -> dict[str, Any]:
    match part:
        case {"type": "text", "text": str(text)}:
            return {"text": text, "image_url": None}
        case {"type": "image_url", "image_url": {"url": str(url)}}:
            return {"text": None, "image_url": url}
    raise _FaultError(f"a part of a message is {str(part)[:80]!r}; texts and image_urls are supported")


def _overrides(body: Mapping[str, Any], *, is_chat: bool) -> dict[str, Any]:
    values: dict[str, Any] = {name: body.get(name) for name in _OWN}
    for name, value in values.items():
        wanted: tuple[type, ...] = (int, float) if name in ("temperature", "top_p") else (int,)
        if value is not None and (isinstance(value, bool) or not isinstance(value, wanted)):
            raise _FaultError(f"{name} is {value!r}, not a number")
    if values["temperature"] is None:
        values["temperature"] = _OPENAI_TEMPERATURE
    most = body.get("max_completion_tokens") or body.get("max_tokens")
    if most is not None and (isinstance(most, bool) or not isinstance(most, int)):
        raise _FaultError(f"max_tokens is {most!r}, not a number")
    values["max_tokens"] = most if most is not None or is_chat else _OPENAI_TEXT_TOKENS
    stop = body.get("stop")
    values["stop"] = [stop] if isinstance(stop, str) else stop or None
    if values["stop"] is not None and not all(isinstance(each, str) for each in values["stop"]):
        raise _FaultError(f"stop is {stop!r}, not a text or a list of texts")
    return values


def output_line(row: Mapping[str, Any], *, model: str) -> str:
    """Return the line of an annotated row, which has custom_id, url and annotation."""
    custom_id, annotation = row["custom_id"], row["annotation"]
    if annotation["error"] is not None:
        return _line(custom_id, *_error(annotation["error"]))
    is_chat, finish = row["url"] != TEXT, annotation["finish_reason"] or "stop"
    choices: list[dict[str, Any]] = []
    for index, text in enumerate(annotation.get("samples") or [annotation["text"]]):
        message = {"role": "assistant", "content": text}
        if annotation.get("reasoning") is not None and index == 0:
            message["reasoning_content"] = annotation["reasoning"]
        answer = {"message": message} if is_chat else {"text": text}
        choices.append({"index": index, **answer, "finish_reason": finish, "logprobs": None})
    prompt, completion = annotation["prompt_tokens"] or 0, annotation["completion_tokens"] or 0
    completed_at: datetime = annotation["completed_at"]
    body = {
        "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{custom_id}",
        "object": "chat.completion" if is_chat else "text_completion",
        "created": int(completed_at.timestamp()),
        "model": model,
        "choices": choices,
        "usage": {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
        },
    }
    return _line(custom_id, 200, body)


def _error(error: Mapping[str, str]) -> tuple[int, dict[str, Any]]:
    is_engine = error["code"].startswith("engine")
    kind = "server_error" if is_engine else "invalid_request_error"
    body = {"error": {"message": error["message"], "type": kind, "code": error["code"]}}
    return 500 if is_engine else 400, body


def _line(custom_id: str, status: int, body: Mapping[str, Any]) -> str:
    response = {"status_code": status, "request_id": f"req-{custom_id}", "body": body}
    line = {"id": f"batch_req_{custom_id}", "custom_id": custom_id, "response": response, "error": None}
    return json.dumps(line, ensure_ascii=False)
