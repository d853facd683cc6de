"""Whether longer prompts have longer answers, learned from rows that have ended."""

from random import Random

import numpy as np
import pytest

from pipemax.api import Completion, RequestError
from pipemax.serve.flow.length_relation import MEMORY, MIN_ROWS, LengthRelation
from pipemax.wire import ErrorCode


def ended(prompt: int, output: int) -> Completion:
    return Completion(request_id="r", prompt_tokens=prompt, completion_tokens=output)


def test_it_is_the_correlation_of_the_logarithms() -> None:
    rng = np.random.default_rng(0)
    prompts = rng.integers(10, 1000, 3000)
    outputs = np.maximum(1, prompts * np.exp(rng.standard_normal(3000))).astype(int)
    relation = LengthRelation()
    relation.observe([ended(int(p), int(o)) for p, o in zip(prompts, outputs, strict=True)])
    assert relation.correlation() == pytest.approx(np.corrcoef(np.log1p(prompts), np.log1p(outputs))[0, 1])


def test_few_rows_and_error_rows_say_nothing() -> None:
    relation = LengthRelation()
    relation.observe([ended(i, i) for i in range(MIN_ROWS - 1)])
    error = RequestError(code=ErrorCode.EMPTY_PROMPT, message="empty")
    relation.observe([Completion(request_id="r", error=error)] * 50)
    assert relation.correlation() is None
    relation.observe([ended(5, 5)])
    assert relation.correlation() == pytest.approx(1.0)


def test_answers_of_one_length_have_no_correlation() -> None:
    relation = LengthRelation()
    relation.observe([ended(i, 7) for i in range(MIN_ROWS)])
    assert relation.correlation() == 0.0


def test_old_rows_are_forgotten() -> None:
    random, relation = Random(0), LengthRelation()
    for _ in range(MEMORY):
        length = random.randrange(10, 1000)
        relation.observe([ended(length, length)])
    for _ in range(5 * MEMORY):
        length = random.randrange(10, 1000)
        relation.observe([ended(length, 1010 - length)])
    correlation = relation.correlation()
    assert correlation is not None
    assert correlation < -0.4
