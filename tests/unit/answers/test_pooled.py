"""A pooling model's vectors become answers, each row once."""

import numpy as np
import pytest

from pipemax.answers.asks import Ask, Prompt, Reply
from pipemax.answers.book import RowBook
from pipemax.answers.pooled import PooledRow, class_names, pooled_answer
from pipemax.generation import RequestError, Sampling
from pipemax.wire import ErrorCode


def vector(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def asks(*names: str, tokens: int = 3) -> list[Ask]:
    return [Ask(ask_id=name, prompt=Prompt([1] * tokens), sampling=Sampling(task="score")) for name in names]


def book_with_a_pair() -> RowBook:
    rows = RowBook()
    rows.open("row", PooledRow("row", asks("q", "d"), "score", {}))
    return rows


def test_an_embedding_is_its_float32_bytes() -> None:
    answer = pooled_answer("embed", [vector(1.5, -2.0)], {})
    assert np.frombuffer(answer["embedding"], np.float32).tolist() == [1.5, -2.0]


def test_the_most_probable_label_is_named() -> None:
    answer = pooled_answer("classify", [vector(0.25, 0.75)], {0: "no", 1: "yes"})
    assert answer == {"label": "yes", "probabilities": (("no", 0.25), ("yes", 0.75)), "probability": 0.75}


@pytest.mark.parametrize("labels", [{}, {0: "a"}, {0: "a", 1: "a"}, {0: "a", 1: ""}])
def test_classes_without_names_of_their_own_are_numbered(labels: dict[int, str]) -> None:
    assert class_names(labels, 2) == ["LABEL_0", "LABEL_1"]


def test_a_score_is_the_cross_encoders_or_the_cosine_of_two_embeddings() -> None:
    assert pooled_answer("score", [vector(0.5)], {}) == {"score": 0.5}
    assert pooled_answer("score", [vector(3, 4), vector(4, 3)], {})["score"] == pytest.approx(0.96)
    assert pooled_answer("score", [vector(0, 0), vector(4, 3)], {})["score"] == 0.0


def test_a_row_ends_with_its_last_ask_in_any_order() -> None:
    rows = book_with_a_pair()
    assert rows.take("d", Reply(pooled=vector(0, 2))) == ([], None)
    _, done = rows.take("q", Reply(pooled=vector(0, 1)))
    assert done is not None
    assert (done.request_id, done.score, done.prompt_tokens, done.completion_tokens) == ("row", 1.0, 6, 0)
    assert rows.take("q", Reply(pooled=vector(0, 1))) == ([], None)


@pytest.mark.parametrize(
    ("reply", "code"),
    [
        (Reply(error=RequestError(code="engine_error", message="refused")), ErrorCode.ENGINE_ERROR),
        (Reply(pooled=vector(float("nan"), 1)), ErrorCode.ENGINE_ERROR),
    ],
)
def test_a_row_with_a_failed_ask_is_an_error(reply: Reply, code: ErrorCode) -> None:
    rows = book_with_a_pair()
    rows.take("q", reply)
    _, done = rows.take("d", Reply(pooled=vector(0, 1)))
    assert done is not None
    assert done.error is not None
    assert done.error.code == code
    assert done.score is None
