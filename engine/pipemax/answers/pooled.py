"""Turn a pooling model's vectors into answers.

A row is one prompt, or two where a query and a document are embedded apart and their score is the cosine of the two
embeddings, as vLLM defines it.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipemax.answers.asks import Ask, Reply
from pipemax.generation import Completion, RequestError
from pipemax.wire import ErrorCode

Vector = NDArray[np.float32]
_SMALLEST_NORMS = 1e-8
"""Of torch's cosine similarity, which vLLM uses."""


class PooledRow:
    """One row of a pooling task, from its asks to its completion."""

    def __init__(self, request_id: str, asks: list[Ask], task: str, labels: Mapping[int, str]) -> None:
        """``labels`` are the model's names of classes, if it has any."""
        self._request_id = request_id
        self._asks = asks
        self._task = task
        self._labels = labels
        self._replies: dict[str, Reply] = {}
        self.completion: Completion | None = None
        """The row's, once no ask is open."""

    @property
    def open_asks(self) -> list[str]:
        return [ask.ask_id for ask in self._asks if ask.ask_id not in self._replies]

    def begin(self) -> list[Ask]:
        """Return all asks."""
        return self._asks

    def take(self, ask_id: str, reply: Reply) -> list[Ask]:
        """Take in the reply to an open ask. There are no further asks; without open ones there is a completion."""
        self._replies[ask_id] = reply
        if not self.open_asks:
            self.completion = self._finished()
        return []

    def _finished(self) -> Completion:
        replies = [self._replies[ask.ask_id] for ask in self._asks]
        prompt_tokens = sum(len(ask.prompt.token_ids) for ask in self._asks)
        error = next((reply.error for reply in replies if reply.error is not None), None)
        vectors = [reply.pooled for reply in replies if reply.pooled is not None]
        if error is None and not all(np.isfinite(vector).all() for vector in vectors):
            error = RequestError(
                code=ErrorCode.ENGINE_ERROR, message="the model's output for the row is not finite"
            )
        if error is not None:
            return Completion(request_id=self._request_id, prompt_tokens=prompt_tokens, error=error)
        answer = pooled_answer(self._task, vectors, self._labels)
        return Completion(request_id=self._request_id, prompt_tokens=prompt_tokens, **answer)


def pooled_answer(task: str, vectors: Sequence[Vector], labels: Mapping[int, str]) -> dict[str, Any]:
    """Return the fields of a completion: an embedding, a label with all probabilities, or a score."""
    first, *others = vectors
    match task:
        case "embed":
            return {"embedding": first.astype(np.float32).tobytes()}
        case "classify":
            names = class_names(labels, len(first))
            return {
                "label": names[int(first.argmax())],
                "probabilities": tuple(zip(names, first.tolist(), strict=True)),
                "probability": float(first.max()),
            }
        case "score":
            return {"score": cosine(first, others[0]) if others else first.item()}
        case _:
            raise ValueError(f"{task!r} is not a task of a pooling model")


def class_names(labels: Mapping[int, str], count: int) -> list[str]:
    """Return the checkpoint's names of its classes; LABEL_0 and so on if it does not name each by itself."""
    names = [str(labels.get(number, "")) for number in range(count)]
    if not all(names) or len(set(names)) < count:
        return [f"LABEL_{number}" for number in range(count)]
    return names


def cosine(first: Vector, second: Vector) -> float:
    """Return the cosine of the angle between two embeddings."""
    norms = float(np.linalg.norm(first) * np.linalg.norm(second))
    return float(np.dot(first, second)) / max(norms, _SMALLEST_NORMS)
