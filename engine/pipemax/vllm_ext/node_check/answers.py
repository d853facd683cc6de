"""Compare what one engine answers to the same prompts twice, with and without its KV going to the host and back.

Steps of other sizes use other kernels, whose sums differ in the last bits; so two runs of the very same model may part
where two tokens are nearly as likely. How far only that makes them differ is measured: runs without any eviction, that
differ in how many prompts run together. What goes beyond a few times that is a fault.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

TOLERANCE_OF_NOISE = 4.0
_LEAST_TOLERANCE = 1e-3
_MOST_TOLERANCE = 1.0
"""In log probability: a factor of e. Runs that differ by more prove nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The tokens of one prompt, sampled greedily."""

    tokens: tuple[int, ...]
    logprobs: tuple[Mapping[int, float], ...]
    """Of the likeliest tokens at each position, the chosen one among them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """How far some answers are from others to the same prompts."""

    num_equal: int
    """Prompts whose tokens are all the same."""
    num_ties: int
    """Prompts whose tokens part where the two choices were nearly as likely."""
    wrong: tuple[int, ...]
    """The places of the prompts whose tokens or log probabilities differ by more than the tolerance."""
    max_difference: float
    """Of log probabilities, up to where the tokens part."""


def tolerance_of(reference: Sequence[Answer], *others: Sequence[Answer]) -> float:
    """Return how far log probabilities may differ, from runs that no copy touched."""
    noise = max(
        (
            difference
            for again in others
            for pair in zip(reference, again, strict=True)
            for difference in _differences(*pair)
        ),
        default=0.0,
    )
    return min(_MOST_TOLERANCE, max(_LEAST_TOLERANCE, TOLERANCE_OF_NOISE * noise))


def compare(reference: Sequence[Answer], answers: Sequence[Answer], *, tolerance: float) -> Comparison:
    """Compare answers to the same prompts, in the same order."""
    num_equal = num_ties = 0
    wrong: list[int] = []
    max_difference = 0.0
    for place, (expected, answer) in enumerate(zip(reference, answers, strict=True)):
        differences = [*_differences(expected, answer)]
        max_difference = max([max_difference, *differences])
        if any(difference > tolerance for difference in differences):
            wrong.append(place)
        elif expected.tokens == answer.tokens:
            num_equal += 1
        else:
            num_ties += 1
    return Comparison(
        num_equal=num_equal, num_ties=num_ties, wrong=tuple(wrong), max_difference=max_difference
    )


def _differences(expected: Answer, answer: Answer) -> Iterator[float]:
    """Yield how far each token's log probability differs, up to and with the first token that is another one."""
    if len(expected.tokens) != len(answer.tokens):
        yield math.inf
        return
    positions = zip(expected.tokens, answer.tokens, expected.logprobs, answer.logprobs, strict=True)
    for token, other, likely, likely_there in positions:
        if token != other:
            # What the reference would have lost by choosing the other one; infinite if that is not even likely.
            yield _or_infinity(likely[token] - likely.get(other, -math.inf))
            return
        yield _or_infinity(abs(likely[token] - likely_there[token]))


def _or_infinity(difference: float) -> float:
    """Return the difference, infinite where one side is NaN: what poison leads to."""
    return math.inf if math.isnan(difference) else difference
