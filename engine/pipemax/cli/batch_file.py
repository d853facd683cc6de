"""Read the lines of OpenAI's batch files as requests of ours, and completions as lines of answers.

A line that cannot be a request becomes an answer with status 400 that says why; it never ends the batch. This module
knows nothing of engines.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from pipemax.generation import Completion, GenerationRequest, Image, Message, Sampling
from pipemax.openai_batch import (
    CHAT,
    BatchRequest,
    RequestFaultError,
    Turn,
    answer_line,
    error_line,
    read_request,
)
from pipemax.wire import joined_parts, shown


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
        url = str(values.get("url", CHAT))
        try:
            request = _request(custom_id, read_request(values))
        except (ValueError, TypeError) as error:
            yield BatchLine(custom_id=custom_id, url=url, fault=str(error))
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
        return error_line(line.custom_id, code=completion.error.code, message=completion.error.message)
    return answer_line(
        line.custom_id,
        url=line.url,
        texts=completion.samples or (completion.text,),
        reasoning=completion.reasoning,
        finish_reason=completion.finish_reason,
        prompt_tokens=completion.prompt_tokens,
        completion_tokens=completion.completion_tokens,
        model=model,
        created_s=created_s,
    )


def fault_of(line: BatchLine) -> dict[str, Any]:
    """Return the output line of a line that is no request."""
    return error_line(line.custom_id, code="invalid_parameter", message=line.fault)


def _numbered(file: TextIO) -> Iterator[tuple[int, str]]:
    return ((number, text) for number, text in enumerate(file, 1) if text.strip())


def _request(custom_id: str, given: BatchRequest) -> GenerationRequest:
    if given.settings_fault:
        raise RequestFaultError(given.settings_fault)
    sampling = _sampling(given)
    if given.turns is None:
        return GenerationRequest(request_id=custom_id, prompt=given.prompt, sampling=sampling)
    messages = tuple(
        Message(role=turn.role, content=_content(turn), fields=turn.fields) for turn in given.turns
    )
    return GenerationRequest(request_id=custom_id, messages=messages, sampling=sampling)


def _content(turn: Turn) -> str | tuple[str | Image, ...]:
    texts = [part.text for part in turn.parts if part.text is not None]
    if len(texts) == len(turn.parts):
        return joined_parts(texts)
    return tuple(part.text if part.text is not None else Image(source=part.image_url) for part in turn.parts)


def _sampling(given: BatchRequest) -> Sampling:
    values: dict[str, Any] = {
        name: value
        for name in ("temperature", "top_p", "top_k", "seed", "max_tokens", "stop")
        if (value := getattr(given, name)) is not None
    }
    for name, value in given.others.items():
        match name:
            case "logprobs":
                raise RequestFaultError("logprobs are not supported in batch files; the job has them")
            case "response_format":
                values[name] = _response_format(value)
            case "chat_template_kwargs":
                values[name] = json.dumps(value) if value else None
            case "choice":
                if not isinstance(value, list):  # a text would be the choices of its letters
                    raise RequestFaultError(f"choice is {shown(value)}, not a list of texts")
                values[name] = tuple(value)
            case _:
                values[name] = value
    return Sampling(**values)


def _response_format(given: Any) -> str:
    match given:
        case {"type": "json_object"}:
            return json.dumps({"type": "object"})
        case {"type": "json_schema", "json_schema": {"schema": dict(schema)}}:
            return json.dumps(schema)
    raise RequestFaultError(
        f"response_format is {given!r}; its type must be text, json_object or json_schema"
    )
