"""How the fake engine answers a row of a pooling task: by a vector that is a function of the row's text."""

import hashlib

import numpy as np

from pipemax.answers.pooled import Vector, pooled_answer
from pipemax.checkpoint.pooling_texts import row_texts
from pipemax.generation import Completion, GenerationRequest, RequestError

VALUES = 8
LABELS = {0: "bad", 1: "good"}


def pooled(request: GenerationRequest, prompt: str, *, prompt_tokens: int) -> Completion:
    """Return the row's completion. A prompt with ``[[error]]`` fails."""
    texts = row_texts(request)
    if "[[error]]" in prompt:
        texts = RequestError(code="engine_error", message="the fake failed this row, as it was told")
    if isinstance(texts, RequestError):
        return Completion(request_id=request.request_id, error=texts)
    task = request.sampling.task
    vectors = [
        vector(text, 2 if task == "classify" else request.sampling.dimensions or VALUES) for text in texts
    ]
    return Completion(
        request_id=request.request_id,
        prompt_tokens=prompt_tokens,
        **pooled_answer(task, vectors, LABELS),
    )


def vector(text: str, values: int = VALUES) -> Vector:
    """Return the fake's embedding of a text."""
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    drawn = np.random.default_rng(int.from_bytes(digest)).random(values, dtype=np.float32)
    return drawn / drawn.sum() if values == 2 else drawn / np.linalg.norm(drawn)
