"""Read the lines of OpenAI's batch files into rows.

A line is a request (custom_id, url, body), in the format of OpenAI's Batch API for ``/v1/chat/completions`` and
``/v1/completions``. What a row can say of itself goes into its overrides, and what only a whole job can say is a fault
of the line. What a request's text holds never ends a job: it is the row's error.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from decimal import Decimal
from typing import Any

import pyarrow as pa

from pipemax.wire import (
    FAULT_TYPE,
    OVERRIDES_TYPE,
    SETTINGS,
    ErrorCode,
    RequestError,
    encodable,
    fields_text,
    guarded,
    joined_parts,
    reason,
    row_setting,
    shown,
)
from pipemax_spark.executor.conversations import FIELDS

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
LINE_COLUMN = "value"
"""Spark's name for the lines of text files."""
_PART = pa.struct([("text", pa.string()), ("image_url", pa.string())])
TEXT_FIELD = "text"
"""Field of a parsed message with its parts' text, for files without images."""
_MESSAGE = pa.struct(
    [("role", pa.string()), ("content", pa.list_(_PART)), (TEXT_FIELD, pa.string()), (FIELDS, pa.string())]
)
PARSED_SCHEMA = pa.schema(
    [
        ("custom_id", pa.string()),
        ("url", pa.string()),
        ("messages", pa.list_(_MESSAGE)),
        ("prompt", pa.string()),
        ("overrides", OVERRIDES_TYPE),
        ("row_fault", FAULT_TYPE),
        ("fault", pa.string()),
        ("has_image", pa.bool_()),
        ("has_fields", pa.bool_()),
    ]
)
"""``row_fault`` is an error of this row only; ``fault`` stops the job before it begins."""
_ID_AT_ITS_BEGINNING = re.compile(r'\s*\{\s*"custom_id"\s*:\s*("(?:[^"\\]|\\.)*")')
_MAX_DIGITS = 400
"""Python refuses to read larger whole numbers than some thousand digits, and no setting needs as many."""
_SETTINGS = {
    parameter: name
    for name, setting in SETTINGS.items()
    if setting.row_type is not None
    for parameter in setting.openai_names
}
"""Parameter → the setting of a row that it is; of two for one setting, the later counts."""
_OF_JOBS = {
    parameter
    for setting in SETTINGS.values()
    if setting.row_type is None
    for parameter in setting.openai_names
}
_PARAMETERS = {*_SETTINGS, *_OF_JOBS, "model", "messages", "prompt"}
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
    "length_penalty": (1,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "tools": ([],),
    "functions": ([],),
    "tool_choice": ("none", "auto"),
    "function_call": ("none", "auto"),
    "logit_bias": ({},),
    "modalities": (["text"],),
    "verbosity": ("medium",),
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
"""Values that turn off a parameter which is no setting of a row: then it may be there. Without tools, the choice among
them is none."""
_DEFAULT_TEMPERATURE = 1.0
_DEFAULT_TEXT_TOKENS = 16
_ALL_TOKENS = -1
"""``top_k`` of vLLM's that keeps all tokens, as 0 does."""


class RequestFaultError(ValueError):
    """A line with which no job can begin; the message says why."""


def parsed_lines(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Turn batches of lines into rows of ``PARSED_SCHEMA``, without blank lines; the function of ``mapInArrow``."""
    for batch in batches:
        column = batch.column(LINE_COLUMN)
        # As bytes: a line need not be UTF-8.
        as_bytes = pa.large_binary() if pa.types.is_large_string(column.type) else pa.binary()
        lines = [line for line in column.cast(as_bytes).to_pylist() if line and line.strip()]
        yield pa.RecordBatch.from_pylist([_row(line) for line in lines], schema=PARSED_SCHEMA)


def _row(line: bytes) -> dict[str, Any]:
    row: dict[str, Any] = dict.fromkeys(PARSED_SCHEMA.names)
    try:
        custom_id, values, error = _read(line)
        row["custom_id"] = encodable(custom_id)
        if row["custom_id"] != custom_id:
            # No table can hold it. As JSON writes it, it still distinguishes the row.
            row["custom_id"] = json.dumps(custom_id)[1:-1]
            error = _fault("the custom_id holds a lone surrogate, and stands here as JSON writes it")
        url = values.get("url", CHAT)
        row["url"] = encodable(url) if isinstance(url, str) else None
        if error is None:
            read = guarded(_request, values, ErrorCode.INVALID_PROMPT)
            if isinstance(read, RequestError):
                error = read
            elif isinstance(read, str):
                raise RequestFaultError(read)
            else:
                row |= read
        if error is not None:
            row["row_fault"] = asdict(error)
    except RequestFaultError as fault:
        row["fault"] = encodable(
            str(fault) if row["custom_id"] is None else f"request {row['custom_id']!r}: {fault}"
        )
    return row


def _read(line: bytes) -> tuple[str, Mapping[str, Any], RequestError | None]:
    """Return a line's id and its values, or the row's error in place of these.

    Raise ``RequestFaultError`` for a line without an id.
    """
    text = line.decode(errors="replace")
    error = None
    try:
        values = json.loads(text, parse_int=_whole_number)
    except RecursionError:
        beginning = _ID_AT_ITS_BEGINNING.match(text)
        if beginning is None:
            raise RequestFaultError(f"a line is nested too deeply to be read: {shown(text)}") from None
        values = {"custom_id": json.loads(beginning[1])}
        error = _fault("the request is nested too deeply to be read")
    except ValueError:
        raise RequestFaultError(f"a line is not JSON: {shown(text)}") from None
    custom_id = values.get("custom_id") if isinstance(values, dict) else None
    if not isinstance(custom_id, str) or not custom_id:
        raise RequestFaultError(f"a line has no custom_id: {shown(text)}")
    try:
        line.decode()
    except UnicodeDecodeError as undecodable:
        error = _fault(reason(undecodable))
    return custom_id, values, error


def _whole_number(digits: str) -> int | Decimal:
    return int(digits) if len(digits) <= _MAX_DIGITS else Decimal(digits)


def _fault(message: str) -> RequestError:
    return RequestError(code=ErrorCode.INVALID_PROMPT, message=message)


def _request(values: Mapping[str, Any]) -> dict[str, Any] | str:
    """Return the request's columns, or why no job can begin with it."""
    try:
        return _columns(values)
    except RequestFaultError as fault:
        return str(fault)


def _columns(line: Mapping[str, Any]) -> dict[str, Any]:
    url, body = line.get("url", CHAT), line.get("body")
    if url not in (CHAT, TEXT):
        raise RequestFaultError(f"url is {url!r}; {CHAT} and {TEXT} are supported")
    if line.get("method", "POST") != "POST":
        raise RequestFaultError(f"method is {line['method']!r}; it must be 'POST'")
    if not isinstance(body, dict):
        raise RequestFaultError("body is missing or not an object")
    parameters = _parameters(body)
    settings = {"temperature": _DEFAULT_TEMPERATURE}
    if url == TEXT:
        settings["max_tokens"] = _DEFAULT_TEXT_TOKENS
    fault = None
    try:
        settings |= _settings(parameters)
    except ValueError as error:
        fault = asdict(RequestError(code=ErrorCode.INVALID_PARAMETER, message=str(error)))
    prompt = body.get("prompt") if url == TEXT else None
    if url == TEXT and not isinstance(prompt, str):
        raise RequestFaultError("prompt must be one text")
    messages = _messages(body.get("messages")) if url == CHAT else None
    for name in parameters:
        if name in _OF_JOBS:
            raise RequestFaultError(
                f"{name} is {shown(parameters[name])}: only the whole job can say it (--{name.replace('_', '-')})"
            )
    return {
        "messages": messages,
        "prompt": None if prompt is None else encodable(prompt),
        "overrides": None if fault else settings,
        "row_fault": fault,
        "has_image": any(
            part["image_url"] is not None for message in messages or () for part in message["content"]
        ),
        "has_fields": any(message[FIELDS] is not None for message in messages or ()),
    }


def _parameters(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters that say something."""
    parameters = {}
    for name, value in body.items():
        is_off = name not in _SETTINGS and value in _OFF.get(name, ())
        if value is None or is_off or name in _WITHOUT_EFFECT:
            continue
        if name not in _PARAMETERS:
            value_said = f" is {shown(value)}, which" if name in _OFF else ""
            raise RequestFaultError(f"parameter {name!r}{value_said} is not supported; leave it out")
        parameters[name] = value
    return parameters


def _settings(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the row's settings; ``ValueError`` names the first that does not fit."""
    settings: dict[str, Any] = {}
    for parameter, name in _SETTINGS.items():
        if parameter in parameters:
            value = row_setting(name, parameters[parameter], name_shown=parameter)
            settings[name] = [_encodable(item) for item in value] if isinstance(value, list) else value
    if settings.get("top_k") == _ALL_TOKENS:
        settings["top_k"] = 0
    return {name: value for name, value in settings.items() if value != []}


def _encodable(item: Any) -> Any:
    return encodable(item) if isinstance(item, str) else item


def _messages(messages: Any) -> list[dict[str, Any]]:
    if not isinstance(messages, list) or not messages:
        raise RequestFaultError("messages must be a list that is not empty")
    return list(map(_message, messages))


def _message(message: Any) -> dict[str, Any]:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise RequestFaultError(f"message {shown(message)} has no role")
    fields = fields_text({name: value for name, value in message.items() if name not in ("role", "content")})
    content = message.get("content")
    if content is None and fields is not None:  # as OpenAI writes an answer of tool calls
        content = []
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(parts, list):
        raise RequestFaultError(f"the content of message {shown(message)} is neither text nor parts")
    parts = list(map(_part, parts))
    texts = [part["text"] for part in parts if part["text"] is not None]
    return {
        "role": encodable(message["role"]),
        "content": parts,
        TEXT_FIELD: joined_parts(texts),
        FIELDS: fields,
    }


def _part(part: Any) -> dict[str, str | None]:
    match part:
        case {"type": "text", "text": str(text)}:
            return {"text": encodable(text), "image_url": None}
        case {"type": "image_url", "image_url": {"url": str(url)}}:
            return {"text": None, "image_url": encodable(url)}
    raise RequestFaultError(f"a part of a message is {shown(part)}; texts and image_urls are supported")
