"""Read the lines of OpenAI's batch files into rows, and write rows as lines of its output files.

A line is a request (custom_id, url, body); what a row can say of itself goes into its overrides, and what only a whole
job can say is a fault of the line. What a request's text holds never ends a job: it is the row's error.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from datetime import datetime
from decimal import Decimal
from typing import Any

import pyarrow as pa

from pipemax.openai_batch import (
    CHAT,
    BatchRequest,
    RequestFaultError,
    answer_line,
    error_line,
    read_request,
)
from pipemax.wire import (
    FAULT_TYPE,
    OVERRIDES_TYPE,
    ErrorCode,
    RequestError,
    encodable,
    guarded,
    joined_parts,
    reason,
    shown,
)
from pipemax_spark.executor.conversations import FIELDS

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
_MOST_DIGITS = 400
"""Python refuses to read larger whole numbers than some thousand digits, and no setting needs as many."""


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
        found = _ID_AT_ITS_BEGINNING.match(text)
        if found is None:
            raise RequestFaultError(f"a line is nested too deeply to be read: {shown(text)}") from None
        values = {"custom_id": json.loads(found[1])}
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
    return int(digits) if len(digits) <= _MOST_DIGITS else Decimal(digits)


def _fault(message: str) -> RequestError:
    return RequestError(code=ErrorCode.INVALID_PROMPT, message=message)


def _request(values: Mapping[str, Any]) -> dict[str, Any] | str:
    """Return the request's columns, or why no job can begin with it."""
    try:
        given = read_request(values)
    except RequestFaultError as fault:
        return str(fault)
    for name, value in given.others.items():
        return f"{name} is {shown(value)}: only the whole job can say it (--{name.replace('_', '-')})"
    return _columns(given)


def _columns(given: BatchRequest) -> dict[str, Any]:
    overrides = {
        name: getattr(given, name) for name in ("temperature", "top_p", "top_k", "seed", "max_tokens")
    }
    turns = given.turns or ()
    fault = None
    if given.settings_fault:
        fault = asdict(RequestError(code=ErrorCode.INVALID_PARAMETER, message=given.settings_fault))
    return {
        "messages": given.turns
        and [
            {
                "role": turn.role,
                "content": [{"text": part.text, "image_url": part.image_url} for part in turn.parts],
                TEXT_FIELD: joined_parts(part.text for part in turn.parts if part.text is not None),
                FIELDS: turn.fields,
            }
            for turn in turns
        ],
        "prompt": given.prompt,
        "overrides": None if fault else {**overrides, "stop": [*given.stop] or None},
        "row_fault": fault,
        "has_image": any(part.image_url is not None for turn in turns for part in turn.parts),
        "has_fields": any(turn.fields is not None for turn in turns),
    }


def output_line(row: Mapping[str, Any], *, model: str) -> str:
    """Return the line of an annotated row, which has custom_id, url and annotation."""
    annotation, error = row["annotation"], row["annotation"]["error"]
    if error is not None:
        line = error_line(row["custom_id"], code=error["code"], message=error["message"])
    else:
        completed_at: datetime = annotation["completed_at"]
        line = answer_line(
            row["custom_id"],
            url=row["url"],
            texts=annotation.get("samples") or [annotation["text"]],
            reasoning=annotation.get("reasoning"),
            finish_reason=annotation["finish_reason"],
            prompt_tokens=annotation["prompt_tokens"] or 0,
            completion_tokens=annotation["completion_tokens"] or 0,
            model=model,
            created_s=int(completed_at.timestamp()),
        )
    return json.dumps(line, ensure_ascii=False)
