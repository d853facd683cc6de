"""Finds the fastest of several simulations without running all of them to their end: successive halving.

All are simulated until a share of their rows have finished. Those far behind are given up, the others go on from where
they stand. The first rows fill the memory, and say less than later ones, so that only a large distance counts early. It
does not know what is simulated.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, TypeVar

K = TypeVar("K")


class Runner(Protocol):
    """A simulation that can pause."""

    def advance(self, share: float) -> float:
        """Simulate until this share of the rows have finished; return the tokens/s that the run seems to come to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One comparison, and who goes on after it."""

    share: float
    """Of the rows that have finished by then."""
    at_least: float
    """Of the fastest's rate: who makes less is given up."""
    most: int
    """Runners that go on at most."""


ROUNDS = (Round(share=0.1, at_least=0.8, most=4), Round(share=0.4, at_least=0.93, most=3))
"""By the paces of all sizes of mixed steps in four settings of the paper (docs/log.md, 2026-11-24)."""


def race(runners: Mapping[K, Runner], rounds: tuple[Round, ...] = ROUNDS) -> list[K]:
    """Return who is left after all rounds, the fastest so far first. Who has no opponent is not simulated."""
    left = [*runners]
    for step in rounds:
        if len(left) == 1:
            break
        rates = {key: runners[key].advance(step.share) for key in left}
        ranked = sorted(left, key=lambda key: -rates[key])
        left = [key for key in ranked[: step.most] if rates[key] >= step.at_least * rates[ranked[0]]]
    return left
