"""Write annotated rows as the lines of OpenAI's output files, in the format of OpenAI's Batch API."""

import json
from collections.abc import Mapping
from typing import Any

from pipemax_spark.executor.openai_batch import TEXT


def output_line(row: Mapping[str, Any], *, model: str) -> str:
    """Return the line of an annotated row, which has custom_id, url and annotation.

    The status of an error is 500 if the engine is the cause, else 400.
    """
    custom_id, error = row["custom_id"], row["annotation"]["error"]
    if error is None:
        status, body = 200, _answer(row, model)
    else:
        is_engine = error["code"].startswith("engine")
        kind = "server_error" if is_engine else "invalid_request_error"
        status = 500 if is_engine else 400
        body = {"error": {"message": error["message"], "type": kind, "code": error["code"]}}
    response = {"status_code": status, "request_id": f"req-{custom_id}", "body": body}
    line = {"id": f"batch_req_{custom_id}", "custom_id": custom_id, "response": response, "error": None}
    return json.dumps(line, ensure_ascii=False)


def _answer(row: Mapping[str, Any], model: str) -> dict[str, Any]:
    """Return the body of an answer; a sample that failed is left out."""
    annotation, is_chat = row["annotation"], row["url"] != TEXT
    samples = annotation.get("samples") or [annotation["text"]]
    choices: list[dict[str, Any]] = []
    for index, text in enumerate(text for text in samples if text is not None):
        message = {"role": "assistant", "content": text}
        if index == 0 and annotation.get("reasoning") is not None:
            message["reasoning_content"] = annotation["reasoning"]
        answer = {"message": message} if is_chat else {"text": text}
        finish = annotation["finish_reason"] or "stop"
        choices.append({"index": index, **answer, "finish_reason": finish, "logprobs": None})
    prompt_tokens = annotation["prompt_tokens"] or 0
    completion_tokens = annotation["completion_tokens"] or 0
    return {
        "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{row['custom_id']}",
        "object": "chat.completion" if is_chat else "text_completion",
        "created": int(annotation["completed_at"].timestamp()),
        "model": model,
        "choices": choices,
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
        },
    }
