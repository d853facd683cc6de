"""Read and write the lines of OpenAI's batch files: requests in, answers out, one JSON object a line.

A line that cannot be a request becomes an answer with status 400 that says why; it never ends the batch. This module
knows nothing of engines. The format: OpenAI's Batch API, for ``/v1/chat/completions`` and ``/v1/completions``.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from pipemax.generation import Completion, GenerationRequest, Image, Message, Sampling

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
_TAKEN = {"temperature", "top_p", "top_k", "seed", "n", "reasoning_effort", "regex", "grammar"}
"""Parameters of a body that are ours under the same name."""
_OTHER = {
    "model",
    "messages",
    "prompt",
    "max_tokens",
    "max_completion_tokens",
    "stop",
    "logprobs",
    "response_format",
}
_OTHER |= {"chat_template_kwargs", "choice"}
_WITHOUT_EFFECT = {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"}
_OFF = {
    "stream": (False,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "echo": (False,),
    "tools": ([],),
}
"""Parameters that are accepted only with a value that turns them off."""
_OPENAI_TEMPERATURE = 1.0


class BatchLineError(ValueError):
    """A line that cannot be a request; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLine:
    """One line of the input: a request, or the reason why it is none."""

    custom_id: str
    url: str = CHAT
    request: GenerationRequest | None = None
    fault: str = ""


def read_ids(file: TextIO) -> list[str]:
    """Return the ``custom_id`` of each line. Raise ``ValueError`` that names a line without one, or two equal ones."""
    seen: dict[str, int] = {}
    for number, text in _numbered(file):
        try:
            custom_id = json.loads(text)["custom_id"]
        except (ValueError, KeyError, TypeError):
            raise ValueError(f"line {number} is not a JSON object with a custom_id: {text[:80]!r}") from None
        if not isinstance(custom_id, str) or not custom_id:
            raise ValueError(
                f"line {number}: custom_id is {custom_id!r}; it must be a text that is not empty"
            )
        if custom_id in seen:
            raise ValueError(
                f"custom_id {custom_id!r} is on lines {seen[custom_id]} and {number}; each must be unique"
            )
        seen[custom_id] = number
    return list(seen)


def read_lines(file: TextIO, *, done: set[str]) -> Iterator[BatchLine]:
    """Yield the lines whose ids are not in ``done``. ``read_ids`` has found no fault in their ids."""
    for _, text in _numbered(file):
        values = json.loads(text)
        custom_id = values["custom_id"]
        if custom_id in done:
            continue
        url = values.get("url", CHAT)
        try:
            request = _request(custom_id, url, values.get("method", "POST"), values.get("body"))
        except (ValueError, TypeError) as error:
            yield BatchLine(custom_id=custom_id, url=str(url), fault=str(error))
        else:
            yield BatchLine(custom_id=custom_id, url=url, request=request)


def read_done(path: Path) -> set[str]:
    """Return the ids of the answers that the output holds already, and cut off a last line that was not finished."""
    done: set[str] = set()
    end = 0
    if not path.exists():
        return done
    with path.open("rb") as file:
        for line in file:
            if not line.endswith(b"\n"):
                break
            end += len(line)
            answer = json.loads(line)
            if answer["response"]["status_code"] == 200:
                done.add(answer["custom_id"])
    with path.open("rb+") as file:
        file.truncate(end)
    return done


def answer_of(line: BatchLine, completion: Completion, *, model: str, created_s: int) -> dict[str, Any]:
    """Return the output line of a completion."""
    if completion.error is not None:
        status = 500 if completion.error.code.startswith("engine") else 400
        return fault_of(line, completion.error.message, code=completion.error.code, status=status)
    texts = [text for text in completion.samples or (completion.text,) if text is not None]
    finish = completion.finish_reason or "stop"
    is_chat = line.url == CHAT
    choices: list[dict[str, Any]] = []
    for index, text in enumerate(texts):
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if completion.reasoning is not None and index == 0:
            message["reasoning_content"] = completion.reasoning
        answer = {"message": message} if is_chat else {"text": text}
        choices.append({"index": index, **answer, "finish_reason": finish, "logprobs": None})
    usage = {
        "prompt_tokens": completion.prompt_tokens,
        "completion_tokens": completion.completion_tokens,
        "total_tokens": completion.prompt_tokens + completion.completion_tokens,
    }
    body = {
        "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{line.custom_id}",
        "object": "chat.completion" if is_chat else "text_completion",
        "created": created_s,
        "model": model,
        "choices": choices,
        "usage": usage,
    }
    return _line(line.custom_id, 200, body)


def fault_of(
    line: BatchLine, message: str, *, code: str = "invalid_parameter", status: int = 400
) -> dict[str, Any]:
    """Return the output line of a request that has no answer."""
    kind = "server_error" if status >= 500 else "invalid_request_error"
    return _line(line.custom_id, status, {"error": {"message": message, "type": kind, "code": code}})


def _line(custom_id: str, status: int, body: Mapping[str, Any]) -> dict[str, Any]:
    response = {"status_code": status, "request_id": f"req-{custom_id}", "body": body}
    return {"id": f"batch_req_{custom_id}", "custom_id": custom_id, "response": response, "error": None}


def _numbered(file: TextIO) -> Iterator[tuple[int, str]]:
    return ((number, text) for number, text in enumerate(file, 1) if text.strip())


def _request(custom_id: str, url: Any, method: Any, body: Any) -> GenerationRequest:
    if url not in (CHAT, TEXT):
        raise BatchLineError(f"url is {url!r}; {CHAT} and {TEXT} are supported")
    if method != "POST":
        raise BatchLineError(f"method is {method!r}; it must be 'POST'")
    if not isinstance(body, dict):
        raise BatchLineError("body is missing or not an object")
    _check_parameters(body)
    sampling = _sampling(body, is_chat=url == CHAT)
    if url == CHAT:
        return GenerationRequest(
            request_id=custom_id, messages=_messages(body.get("messages")), sampling=sampling
        )
    prompt = body.get("prompt")
    if not isinstance(prompt, str):
        raise BatchLineError("prompt must be one text")
    return GenerationRequest(request_id=custom_id, prompt=prompt, sampling=sampling)


def _check_parameters(body: Mapping[str, Any]) -> None:
    for name, value in body.items():
        if name in _TAKEN | _OTHER | _WITHOUT_EFFECT or value is None:
            continue
        if name not in _OFF:
            raise BatchLineError(f"parameter {name!r} is not supported")
        if value not in _OFF[name]:
            raise BatchLineError(f"parameter {name!r} is {value!r}, which is not supported; leave it out")


def _messages(given: Any) -> tuple[Message, ...]:
    if not isinstance(given, list) or not given:
        raise BatchLineError("messages must be a list that is not empty")
    messages = []
    for message in given:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise BatchLineError(f"message {message!r} has no role")
        content = message.get("content")
        if isinstance(content, list):
            parts = tuple(map(_part, content))
            texts = [part for part in parts if isinstance(part, str)]
            content = "".join(texts) if len(texts) == len(parts) else parts
        if not isinstance(content, str | tuple):
            raise BatchLineError(f"the content of message {message!r} is not text")
        messages.append(Message(role=message["role"], content=content))
    return tuple(messages)


def _part(part: Any) -> str | Image:
    match part:
        case {"type": "text", "text": str(text)}:
            return text
        case {"type": "image_url", "image_url": {"url": str(url)}}:
            return Image(source=url)
    raise BatchLineError(f"a part of a message is {str(part)[:80]!r}; texts and image_urls are supported")


def _sampling(body: Mapping[str, Any], *, is_chat: bool) -> Sampling:
    values = {name: body[name] for name in _TAKEN if body.get(name) is not None}
    values.setdefault("temperature", _OPENAI_TEMPERATURE)
    most = body.get("max_completion_tokens") or body.get("max_tokens")
    if most is not None:
        values["max_tokens"] = most
    elif not is_chat:
        values["max_tokens"] = 16  # OpenAI's default for completions
    stop = body.get("stop") or ()
    values["stop"] = (stop,) if isinstance(stop, str) else tuple(stop)
    if body.get("choice"):
        values["choice"] = tuple(body["choice"])
    if body.get("chat_template_kwargs"):
        values["chat_template_kwargs"] = json.dumps(body["chat_template_kwargs"])
    if body.get("logprobs"):
        raise BatchLineError("logprobs are not supported in batch files; the job has them")
    if (shape := _response_format(body.get("response_format"))) is not None:
        values["response_format"] = shape
    return Sampling(**values)


def _response_format(given: Any) -> str | None:
    match given:
        case None | {"type": "text"}:
            return None
        case {"type": "json_object"}:
            return json.dumps({"type": "object"})
        case {"type": "json_schema", "json_schema": {"schema": dict(schema)}}:
            return json.dumps(schema)
    raise BatchLineError(f"response_format is {given!r}; its type must be text, json_object or json_schema")
