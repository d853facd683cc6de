"""Read the lines of OpenAI's batch files into rows, and write rows as lines of its output files.

A line is a request (custom_id, url, body); what a row can say of itself goes into its overrides, and what only a whole
job can say is a fault of the line.
"""

import json
from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any

import pyarrow as pa

from pipemax.openai_batch import CHAT, BatchRequest, RequestFaultError, answer_line, error_line, read_request
from pipemax.wire import OVERRIDES_TYPE

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
            raise RequestFaultError(f"a line has no custom_id: {line[:80]!r}")
        row["custom_id"] = custom_id
        row |= {"url": values.get("url", CHAT), **_request(read_request(values))}
    except RequestFaultError as fault:
        row["fault"] = str(fault) if row["custom_id"] is None else f"request {row['custom_id']!r}: {fault}"
    except ValueError:
        row["fault"] = f"a line is not JSON: {line[:80]!r}"
    return row


def _request(given: BatchRequest) -> dict[str, Any]:
    for name, value in given.others.items():
        raise RequestFaultError(
            f"{name} is {value!r}: only the whole job can say it (--{name.replace('_', '-')}); pipemax run-batch "
            "takes it per request"
        )
    overrides = {
        name: getattr(given, name) for name in ("temperature", "top_p", "top_k", "seed", "max_tokens")
    }
    parts = [part for turn in given.turns or () for part in turn.parts]
    return {
        "messages": given.turns
        and [
            {
                "role": turn.role,
                "content": [{"text": part.text, "image_url": part.image_url} for part in turn.parts],
            }
            for turn in given.turns
        ],
        "prompt": given.prompt,
        "overrides": {**overrides, "stop": [*given.stop] or None},
        "has_image": any(part.image_url is not None for part in parts),
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
