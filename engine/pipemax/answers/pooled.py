"""Keep the rows that a pooling model has, and turn its pooled vectors into answers.

A row is one prompt, or two where a query and a document are embedded apart and their score is the cosine of the two
embeddings, as vLLM defines it. Rows are opened and aborted on any thread.
"""

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipemax.answers.asks import Ask, Reply
from pipemax.generation import Completion, RequestError
from pipemax.wire import ErrorCode

Vector = NDArray[np.float32]
_SMALLEST_NORMS = 1e-8
"""Of torch's cosine similarity, which vLLM uses."""


@dataclass(slots=True)
class _Row:
    request_id: str
    prompt_tokens: int
    ask_ids: tuple[str, ...]
    replies: dict[str, Reply] = field(default_factory=dict)


class PooledRows:
    """The open rows of a pooling task and their asks. Thread-safe."""

    def __init__(self, task: str, labels: Mapping[int, str] | None = None) -> None:
        """``labels`` are the model's names of classes, if it has any."""
        self._task = task
        self._labels = labels or {}
        self._lock = threading.Lock()
        self._rows: dict[str, _Row] = {}
        self._row_of: dict[str, _Row] = {}  # by ask

    def __len__(self) -> int:
        return len(self._rows)

    def open(self, request_id: str, asks: Sequence[Ask]) -> None:
        """Note a row and its asks."""
        tokens = sum(len(ask.prompt.token_ids) for ask in asks)
        row = _Row(request_id, tokens, tuple(ask.ask_id for ask in asks))
        with self._lock:
            self._rows[request_id] = row
            self._row_of |= dict.fromkeys(row.ask_ids, row)

    def take(self, ask_id: str, reply: Reply) -> tuple[list[Ask], Completion | None]:
        """Take in what was told of an ask. Return no further asks, and the row's completion if this was its last."""
        with self._lock:
            row = self._row_of.pop(ask_id, None)
            if row is None:
                return [], None
            row.replies[ask_id] = reply
            if len(row.replies) < len(row.ask_ids):
                return [], None
            del self._rows[row.request_id]
        return [], self._completion(row)

    def abort(self, request_ids: Iterable[str]) -> list[str]:
        """Forget rows. Return their open asks; unknown ids are ignored."""
        with self._lock:
            rows = [self._rows.pop(request_id) for request_id in request_ids if request_id in self._rows]
            open_asks = [ask_id for row in rows for ask_id in row.ask_ids if ask_id not in row.replies]
            for ask_id in open_asks:
                del self._row_of[ask_id]
            return open_asks

    def _completion(self, row: _Row) -> Completion:
        replies = [row.replies[ask_id] for ask_id in row.ask_ids]
        error = next((reply.error for reply in replies if reply.error is not None), None)
        vectors = [reply.pooled for reply in replies if reply.pooled is not None]
        if error is None and not all(np.isfinite(vector).all() for vector in vectors):
            error = RequestError(
                code=ErrorCode.ENGINE_ERROR, message="the model's output for the row is not finite"
            )
        if error is not None:
            return Completion(request_id=row.request_id, prompt_tokens=row.prompt_tokens, error=error)
        answer = pooled_answer(self._task, vectors, self._labels)
        return Completion(request_id=row.request_id, prompt_tokens=row.prompt_tokens, **answer)


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
