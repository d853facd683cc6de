"""Answers are told apart by log probabilities: near ties are none's fault, what goes beyond the noise is."""

import math
from collections.abc import Sequence

import pytest

from pipemax.vllm_ext.node_check.answers import Answer, compare, tolerance_of


def answer(tokens: Sequence[int], **changes: float) -> Answer:
    """Tokens 1 to 3 are likely at each position; ``p0=-0.5`` changes the chosen token's at the first."""
    logprobs = [{1: -0.6, 2: -0.7, 3: -3.0} for _ in tokens]
    for place, token in enumerate(tokens):
        logprobs[place][token] = changes.get(f"p{place}", logprobs[place].get(token, -9.0))
    return Answer(tokens=tuple(tokens), logprobs=tuple(logprobs))


REFERENCE = [answer([1, 1, 2]), answer([1, 2, 1])]


def test_equal_answers_are_equal() -> None:
    result = compare(REFERENCE, REFERENCE, tolerance=1e-3)
    assert (result.num_equal, result.num_ties, result.wrong) == (2, 0, ())
    assert result.max_difference == 0


@pytest.mark.parametrize(
    ("other", "is_tie"),
    [
        (answer([1, 2, 2]), True),  # 2 is as likely as 1 within 0.1
        (answer([1, 3, 2]), False),
        (answer([1, 8, 2]), False),  # not even among the likeliest
    ],
)
def test_answers_may_part_only_where_two_tokens_are_as_likely(other: Answer, is_tie: bool) -> None:
    result = compare([REFERENCE[0]], [other], tolerance=0.2)
    assert (result.num_ties, result.wrong) == ((1, ()) if is_tie else (0, (0,)))


@pytest.mark.parametrize("logprob", [-0.9, math.nan])
def test_the_same_tokens_with_other_probabilities_are_wrong(logprob: float) -> None:
    result = compare(REFERENCE, [REFERENCE[0], answer([1, 2, 1], p2=logprob)], tolerance=0.2)
    assert result.wrong == (1,)


def test_an_answer_that_is_cut_off_is_wrong() -> None:
    assert compare([REFERENCE[0]], [answer([1, 1])], tolerance=1.0).wrong == (0,)


def test_the_tolerance_is_four_times_the_noise_of_the_engine_within_bounds() -> None:
    noisy = [answer([1, 1, 2], p1=-0.65), REFERENCE[1]]
    assert tolerance_of(REFERENCE, noisy) == pytest.approx(0.2)
    assert tolerance_of(REFERENCE, REFERENCE) == 1e-3
    assert tolerance_of(REFERENCE, [answer([8, 1, 2]), REFERENCE[1]]) == 1.0
