"""Convert between Arrow and the engine's types: request batches in, completion batches out, sampling checked.

Pure functions: nothing here knows of sessions, sockets or engines.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any

import pyarrow as pa

from pipemax.api import Completion, GenerationRequest, Image, Message, RequestError, Sampling
from pipemax.generation import CARRIED
from pipemax.wire import (
    COMPLETION_SCHEMA,
    REQUEST_SCHEMA,
    ErrorCode,
    PreflightRequest,
    RowFaultError,
    encodable,
    guarded,
    joined_parts,
    python_values,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedRow:
    """One row that has ended, well or with an error."""

    row_id: int
    completion: Completion
    completed_at_us: int
    """Microseconds after 1970, UTC."""

    def output_size(self) -> int:
        """Estimate the bytes that the row holds until it is delivered."""
        done = self.completion
        texts = [done.text, done.reasoning, *(done.samples or ()), done.error.message if done.error else None]
        others = 32 * len([*(done.probabilities or ()), *(done.field_probabilities or ())])
        others += len(done.embedding or b"")
        return 64 + sum(len(text) for text in texts if text is not None) + others


def sampled_requests(
    request: PreflightRequest, asked: Sequence[Sampling]
) -> list[GenerationRequest | RequestError]:
    """Return a check's sampled rows as the engine would get them, or the errors of those that it would not get.

    ``asked`` are the samplings of the job and of its questions.
    """
    rows = [{**row, "row_id": number} for number, row in enumerate(request.requests)]
    batch = pa.RecordBatch.from_pylist(rows, schema=REQUEST_SCHEMA)
    made, faults = requests_of(
        batch, job=asked[0], questions=asked[1:], system=request.generation.system, id_prefix=""
    )
    by_number: dict[int, GenerationRequest | RequestError] = dict(faults)
    by_number |= {int(one.request_id): one for one in made}
    return [by_number[number] for number in range(len(rows))]


def without_images(request: GenerationRequest) -> GenerationRequest:
    """Return the request with its texts only: nobody opens images for a count."""
    if not request.images:
        return request
    turns = tuple(replace(turn, content=joined_parts(turn.texts)) for turn in request.messages or ())
    return replace(request, messages=turns)


def requests_of(
    batch: pa.RecordBatch,
    *,
    job: Sampling,
    questions: Sequence[Sampling] = (),
    system: str | None,
    id_prefix: str,
) -> tuple[list[GenerationRequest], list[tuple[int, RequestError]]]:
    """Convert a REQUEST_SCHEMA batch to requests; return them and the errors of rows that cannot be.

    ``questions`` are the samplings of rows that name a question, ``job`` is that of the others. A request's id is
    ``id_prefix`` followed by its row id. A row that only the engine can judge (an empty or over-long prompt) stays a
    request.
    """
    names = ("prompt", "messages", "images", "overrides", "question", "fault")
    columns = [python_values(batch.column(name)) for name in names]
    requests: list[GenerationRequest] = []
    faults: list[tuple[int, RequestError]] = []
    row_ids = batch.column("row_id").to_pylist()
    for row_id, *of_row, question, fault in zip(row_ids, *columns, strict=True):
        if fault is not None:
            faults.append((row_id, RequestError(**fault)))
            continue
        asked = job if question is None else questions[question]
        work = partial(_request, f"{id_prefix}{row_id}", asked, system)
        request = guarded(work, tuple(of_row), ErrorCode.INVALID_PROMPT)
        if isinstance(request, RequestError):
            faults.append((row_id, request))
        else:
            requests.append(request)
    return requests, faults


def _request(
    request_id: str, job: Sampling, system: str | None, values: tuple[Any, Any, Any, Any]
) -> GenerationRequest:
    """Return the request of a row's prompt, messages, images and overrides."""
    for value in values:
        if isinstance(value, Exception):
            raise value
    prompt, messages, images, overrides = values
    prompt, turns = _with_images(prompt, _messages(messages), _images(images))
    sampling = _sampling(job, overrides, prompt, turns)
    return GenerationRequest(
        request_id=request_id, prompt=prompt, messages=turns, system=system, sampling=sampling
    )


def completion_batch(rows: Sequence[FinishedRow]) -> pa.RecordBatch:
    """Convert finished rows to one COMPLETION_SCHEMA batch."""
    done = [row.completion for row in rows]
    errors = [completion.error for completion in done]
    columns: dict[str, Any] = {
        "row_id": [row.row_id for row in rows],
        "error_code": [error and error.code for error in errors],
        "error_message": [error and encodable(error.message) for error in errors],
        "completed_at": [row.completed_at_us for row in rows],
    }
    for name in CARRIED:
        columns[name] = [getattr(completion, name) for completion in done]
    arrays = [_array(columns[field.name], field.type) for field in COMPLETION_SCHEMA]
    return pa.RecordBatch.from_arrays(arrays, schema=COMPLETION_SCHEMA)


def _array(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    """Return values as Arrow takes them: one odd text must not end its session."""
    if kind == pa.list_(pa.float32()):
        return embedding_array(values)
    if kind == pa.string():
        values = [value if value is None else encodable(value) for value in values]
    elif kind == pa.list_(pa.string()):
        values = [texts and [text and encodable(text) for text in texts] for texts in values]
    return pa.array(values, kind)


def embedding_array(embeddings: Sequence[bytes | None]) -> pa.ListArray:
    """Return embeddings as lists of floats. Their bytes become the array's memory, value by value in no Python list."""
    values = pa.py_buffer(b"".join(embedding for embedding in embeddings if embedding is not None))
    flat = pa.Array.from_buffers(pa.float32(), values.size // 4, [None, values])
    ends = accumulate((len(embedding or b"") // 4 for embedding in embeddings), initial=0)
    is_null = pa.array([embedding is None for embedding in embeddings], pa.bool_())
    return pa.ListArray.from_arrays(pa.array(ends, pa.int32()), flat, mask=is_null)


def _messages(turns: list[dict[str, Any] | None] | None) -> tuple[Message, ...] | None:
    if turns is None:
        return None
    messages = []
    for number, turn in enumerate(turns, start=1):
        role, content, parts, further = (
            (turn or {}).get(name) for name in ("role", "content", "parts", "fields")
        )
        if parts is not None:
            content = _content(parts)
        elif content is None and further is not None:
            content = ""  # a turn of tool calls has no content, and vLLM gives the template this
        if role is None or content is None:
            raise RowFaultError(
                ErrorCode.INVALID_PROMPT, f"message {number} of {len(turns)} lacks its role or content"
            )
        messages.append(Message(role=role, content=content, fields=further))
    return tuple(messages)


def _content(parts: list[dict[str, Any] | None]) -> str | tuple[str | Image, ...] | None:
    """Return the content of a message in parts: text if none of them is an image."""
    content: list[str | Image] = []
    for number, part in enumerate(parts, start=1):
        text, image = (part or {}).get("text"), (part or {}).get("image")
        if text is None and image is None:
            raise RowFaultError(
                ErrorCode.INVALID_PROMPT,
                f"part {number} of {len(parts)} of a message has no text and no image",
            )
        content += _images([image]) if text is None else [text]
    texts = [part for part in content if isinstance(part, str)]
    return joined_parts(texts) if len(texts) == len(content) else tuple(content)


def _images(images: list[dict[str, Any] | None] | None) -> list[Image]:
    made = [Image(**image) if image else Image() for image in images or ()]
    for number, image in enumerate(made, start=1):
        if image == Image():
            raise RowFaultError(ErrorCode.INVALID_IMAGE, f"image {number} of {len(made)} is null")
    return made


def _with_images(
    prompt: str | None, turns: tuple[Message, ...] | None, images: list[Image]
) -> tuple[str | None, tuple[Message, ...] | None]:
    """Return prompt and messages; a prompt with images becomes a message. A blank prompt stays the row's error."""
    if not images or prompt is None or not prompt.strip():
        return prompt, turns
    return None, (*(turns or ()), Message(role="user", content=(*images, prompt)))


def _sampling(
    job: Sampling, overrides: dict[str, Any] | None, prompt: str | None, turns: tuple[Message, ...] | None
) -> Sampling:
    """Return the row's sampling. A row's own seed is used as it is; the job's is mixed with the row's prompt."""
    settings: dict[str, Any] = {
        name: tuple(text for text in value if text is not None) if isinstance(value, list) else value
        for name, value in (overrides or {}).items()
        if value is not None
    }
    try:
        sampling = replace(job, **settings) if settings else job
    except ValueError as error:
        raise RowFaultError(ErrorCode.INVALID_PARAMETER, str(error)) from None
    if sampling.seed is None or sampling.temperature == 0.0 or "seed" in settings:
        return sampling
    return replace(sampling, seed=row_seed(sampling.seed, prompt, turns))


def row_seed(job_seed: int, prompt: str | None, turns: tuple[Message, ...] | None) -> int:
    """Return a row's seed: the same for the same job seed and prompt, on every machine and in every attempt."""
    content = json.dumps([job_seed, prompt, [turn.identity() for turn in turns or ()]])
    return int.from_bytes(hashlib.blake2b(content.encode(), digest_size=8).digest()) >> 1
