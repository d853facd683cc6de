"""The lines of OpenAI's batch files: what a request says, and how it is answered.

The job's input format reads them, and its batch output writes them. The format: OpenAI's Batch API, for
``/v1/chat/completions`` and ``/v1/completions``.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pipemax.wire import encodable, fields_text, row_setting, shown

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
_SETTINGS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "seed": "seed",
    "max_tokens": "max_tokens",
    "max_completion_tokens": "max_tokens",
    "stop": "stop",
}
"""Parameter → the setting of a row that it is; of two for one setting, the later counts."""
_READ = {*_SETTINGS, "model", "messages", "prompt"}
_OTHERS = {
    "n",
    "response_format",
    "logprobs",
    "reasoning_effort",
    "chat_template_kwargs",
    "regex",
    "grammar",
    "choice",
}
_WITHOUT_EFFECT = {
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "parallel_tool_calls",
    "stream_options",
}
_OFF: dict[str, tuple[Any, ...]] = {
    "stream": (False,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "min_p": (0,),
    "min_tokens": (0,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "tools": ([],),
    "functions": ([],),
    "tool_choice": ("none", "auto"),
    "function_call": ("none", "auto"),
    "logit_bias": ({},),
    "bad_words": ([],),
    "stop_token_ids": ([],),
    "modalities": (["text"],),
    "verbosity": ("medium",),
    "ignore_eos": (False,),
    "use_beam_search": (False,),
    "skip_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "top_logprobs": (0,),
    "n": (1,),
    "logprobs": (False, 0),
    "response_format": ({"type": "text"},),
}
"""Values that turn a parameter off: then it may be there. Without tools, the choice among them is none."""
_DEFAULT_TEMPERATURE = 1.0
_DEFAULT_TEXT_TOKENS = 16
_ALL_TOKENS = -1
"""``top_k`` of vLLM's that keeps all tokens, as 0 does."""


class RequestFaultError(ValueError):
    """A line that cannot be a request; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A part of a message: a text, or the URL of an image."""

    text: str | None = None
    image_url: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """A message of a chat."""

    role: str
    parts: tuple[Part, ...]
    fields: str | None = None
    """A JSON object, as text, of further fields, such as ``tool_calls``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRequest:
    """A request, with OpenAI's defaults. It has turns or, for completions, a prompt."""

    turns: tuple[Turn, ...] | None = None
    prompt: str | None = None
    temperature: float = _DEFAULT_TEMPERATURE
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    others: Mapping[str, Any] = field(default_factory=dict)
    """Parameters for the shape and the number of answers, as they were given, unless their value turns them off."""
    settings_fault: str = ""
    """What is wrong with one of the settings, such as ``max_tokens``, if one does not fit; then none of them counts."""


def read_request(line: Mapping[str, Any]) -> BatchRequest:
    """Read what a line says apart from its id.

    Raise ``RequestFaultError`` if it cannot be a request, and ``RowFaultError`` for a message that cannot be passed on.
    """
    url, body = line.get("url", CHAT), line.get("body")
    if url not in (CHAT, TEXT):
        raise RequestFaultError(f"url is {url!r}; {CHAT} and {TEXT} are supported")
    if line.get("method", "POST") != "POST":
        raise RequestFaultError(f"method is {line['method']!r}; it must be 'POST'")
    if not isinstance(body, dict):
        raise RequestFaultError("body is missing or not an object")
    given = _parameters(body)
    settings, fault = _settings(given)
    if url == TEXT:
        settings.setdefault("max_tokens", _DEFAULT_TEXT_TOKENS)
    prompt = body.get("prompt") if url == TEXT else None
    if url == TEXT and not isinstance(prompt, str):
        raise RequestFaultError("prompt must be one text")
    return BatchRequest(
        **({} if fault else settings),
        settings_fault=fault,
        others={name: value for name, value in given.items() if name in _OTHERS},
        turns=_turns(body.get("messages")) if url == CHAT else None,
        prompt=None if prompt is None else encodable(prompt),
    )


def _parameters(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters that say something."""
    given = {}
    for name, value in body.items():
        if value is None or name in _WITHOUT_EFFECT or value in _OFF.get(name, ()):
            continue
        if name in _OFF.keys() - _OTHERS:
            raise RequestFaultError(
                f"parameter {name!r} is {shown(value)}, which is not supported; leave it out"
            )
        if name not in _READ | _OTHERS:
            raise RequestFaultError(f"parameter {name!r} is not supported; leave it out")
        given[name] = value
    return given


def _settings(given: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """Return the row's settings, and what is wrong with the first one that does not fit."""
    settings: dict[str, Any] = {}
    for parameter, name in _SETTINGS.items():
        if parameter not in given:
            continue
        try:
            settings[name] = row_setting(name, given[parameter], told_as=parameter)
        except ValueError as error:
            return {}, str(error)
    if settings.get("top_k") == _ALL_TOKENS:
        settings["top_k"] = 0
    if "stop" in settings:
        settings["stop"] = tuple(map(encodable, settings["stop"]))
    return settings, ""


def _turns(given: Any) -> tuple[Turn, ...]:
    if not isinstance(given, list) or not given:
        raise RequestFaultError("messages must be a list that is not empty")
    return tuple(map(_turn, given))


def _turn(given: Any) -> Turn:
    if not isinstance(given, dict) or not isinstance(given.get("role"), str):
        raise RequestFaultError(f"message {shown(given)} has no role")
    fields = fields_text({name: value for name, value in given.items() if name not in ("role", "content")})
    content = given.get("content")
    if content is None and fields is not None:  # as OpenAI writes an answer of tool calls
        content = []
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(parts, list):
        raise RequestFaultError(f"the content of message {shown(given)} is neither text nor parts")
    return Turn(role=encodable(given["role"]), parts=tuple(map(_part, parts)), fields=fields)


def _part(given: Any) -> Part:
    match given:
        case {"type": "text", "text": str(text)}:
            return Part(text=encodable(text))
        case {"type": "image_url", "image_url": {"url": str(url)}}:
            return Part(image_url=encodable(url))
    raise RequestFaultError(f"a part of a message is {shown(given)}; texts and image_urls are supported")


def answer_line(
    custom_id: str,
    *,
    url: str,
    texts: Sequence[str | None],
    reasoning: str | None,
    finish_reason: str | None,
    prompt_tokens: int,
    completion_tokens: int,
    model: str,
    created_s: int,
) -> dict[str, Any]:
    """Return the line of an answer. ``texts`` are its samples; a sample that failed, None, is left out."""
    is_chat = url != TEXT
    choices: list[dict[str, Any]] = []
    for index, text in enumerate(text for text in texts if text is not None):
        message = {"role": "assistant", "content": text}
        if reasoning is not None and index == 0:
            message["reasoning_content"] = reasoning
        answer = {"message": message} if is_chat else {"text": text}
        finish = finish_reason or "stop"
        choices.append({"index": index, **answer, "finish_reason": finish, "logprobs": None})
    body = {
        "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{custom_id}",
        "object": "chat.completion" if is_chat else "text_completion",
        "created": created_s,
        "model": model,
        "choices": choices,
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
        },
    }
    return _line(custom_id, 200, body)


def error_line(custom_id: str, *, code: str, message: str) -> dict[str, Any]:
    """Return the line of a request without an answer: status 500 if the engine is the cause, else 400."""
    is_engine = code.startswith("engine")
    kind = "server_error" if is_engine else "invalid_request_error"
    body = {"error": {"message": message, "type": kind, "code": code}}
    return _line(custom_id, 500 if is_engine else 400, body)


def _line(custom_id: str, status: int, body: Mapping[str, Any]) -> dict[str, Any]:
    response = {"status_code": status, "request_id": f"req-{custom_id}", "body": body}
    return {"id": f"batch_req_{custom_id}", "custom_id": custom_id, "response": response, "error": None}
