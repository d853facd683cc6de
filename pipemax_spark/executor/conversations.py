"""Convert users' columns of conversations into those of a request.

A message's content is text, or an array of parts as OpenAI writes them: structs with ``text``, and with ``image_url``
(a string, or a struct with ``url``) or ``image`` (binary). Its further fields travel as JSON text.
"""

import json
from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from pipemax.wire import (
    MESSAGE_TYPE,
    ErrorCode,
    RequestError,
    RowFaultError,
    fields_text,
    guarded_all,
    python_values,
)
from pipemax_spark.errors import JobError

FIELDS = "__pipemax_fields"
"""Field of a message whose value is the JSON text of all of its further fields, as batch files bring them."""
_PART_TYPES = ("text", "image_url", "input_text", "input_image")
"""What ``type`` of a part may say."""


def messages_of(column: pa.Array) -> tuple[pa.Array, list[RequestError | None]]:
    """Return conversations as requests have them, and the error of each row whose conversation cannot be one.

    Raise ``JobError`` for a column of another type.
    """
    kind = column.type
    wanted = pa.list_(MESSAGE_TYPE)
    check_conversations(kind)
    no_faults: list[RequestError | None] = [None] * len(column)
    if kind == wanted:
        return column, no_faults
    if pa.types.is_null(kind):
        return pa.nulls(len(column), wanted), no_faults
    rows, faults = guarded_all(_turns, python_values(column), ErrorCode.INVALID_PROMPT)
    return pa.array(rows, wanted), faults


def check_conversations(kind: pa.DataType) -> None:
    """Raise ``JobError`` if values of this type are no conversations."""
    if pa.types.is_null(kind):
        return
    message = kind.value_type if _is_list(kind) else None
    names = [field.name for field in message] if message is not None and pa.types.is_struct(message) else []
    if not {"role", "content"} <= set(names):
        raise JobError(f"a conversation is of the type {kind}; give array<struct<role, content>>")
    assert message is not None
    role, content = message.field("role").type, message.field("content").type
    if not _is_text(role):
        raise JobError(f"the role of a message is of the type {role}; give string")
    if _is_list(content):
        _check_part(content.value_type)
    elif not _is_text(content):
        raise JobError(
            f"the content of a message is of the type {content}; give string, or an array of parts"
        )


def _check_part(kind: pa.DataType) -> None:
    types = {field.name: field.type for field in kind} if pa.types.is_struct(kind) else {}
    url = types.get("image_url", pa.null())
    if pa.types.is_struct(url):
        url = next((field.type for field in url if field.name == "url"), pa.null())
    image = types.get("image", pa.null())
    is_image = any(check(image) for check in (pa.types.is_null, pa.types.is_binary, pa.types.is_large_binary))
    is_fine = is_image and all(
        map(_is_text, (types.get("text", pa.null()), types.get("type", pa.null()), url))
    )
    if not is_fine or not {"text", "image_url", "image"} & types.keys():
        raise JobError(
            f"the parts of a message are of the type {kind}; give structs with text, and with image_url or image"
        )


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind))


def _is_text(kind: pa.DataType) -> bool:
    return any(check(kind) for check in (pa.types.is_null, pa.types.is_string, pa.types.is_large_string))


def _turns(turns: list[Mapping[str, Any] | None] | None) -> list[dict[str, Any] | None] | None:
    return None if turns is None else [_message(turn) for turn in turns]


def _message(turn: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if turn is None:
        return None
    others = {name: value for name, value in turn.items() if name not in ("role", "content", FIELDS)}
    of_structs = [name for name, value in others.items() if not isinstance(value, str)]
    further = turn.get(FIELDS) or fields_text(_read(others), of_structs=of_structs)
    message: dict[str, Any] = {"role": turn["role"], "fields": further}
    content = turn["content"]
    if isinstance(content, list):
        return {**message, "content": None, "parts": [_part(part) for part in content]}
    return {**message, "content": content, "parts": None}


def _read(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields with tool calls that a column holds as JSON text, because their arguments differ, as values."""
    calls = fields.get("tool_calls")
    if not isinstance(calls, str):
        return fields
    try:
        read = json.loads(calls) if calls.strip() else None
    except (ValueError, RecursionError):
        read = calls
    if read is not None and not isinstance(read, list):
        raise RowFaultError(
            ErrorCode.INVALID_PROMPT, "the field 'tool_calls' of a message is a text, but no JSON array"
        )
    return {**fields, "tool_calls": read}


def _part(part: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return a part as a request has it; one of another type has neither text nor image, which is its row's error."""
    if part is None or part.get("type") not in (None, *_PART_TYPES):
        return None
    url = part.get("image_url")
    source = url.get("url") if isinstance(url, Mapping) else url
    image = {"content": part.get("image"), "source": source}
    has_image = image["content"] is not None or source is not None
    if has_image and part.get("text"):
        raise RowFaultError(
            ErrorCode.INVALID_PROMPT, "a part of a message has a text and an image; make two parts of it"
        )
    return {"text": None if has_image else part.get("text"), "image": image if has_image else None}
