"""Decide what answers to the same prompts prove. Pure: nothing here knows an engine.

Sums on a GPU depend on the batch, so tokens of different batches may differ on a machine that is right. Each
comparison has a control in which nothing that is checked takes part; where the control differs, it proves nothing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pipemax.vllm_ext.launch.known_check import TOKENS, CheckPart, Verdict

POISON = "poison"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The tokens of one prompt, sampled greedily."""

    tokens: tuple[int, ...]
    is_finite: bool = True
    """Whether all their log probabilities are numbers; NaN in the KV leads to others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """The answers to all prompts, in their order, and how much KV came back from the host meanwhile."""

    answers: Sequence[Answer]
    prefetches: int = 0
    moved: str = ""
    """The same in words."""
    least_prefetches: int = 0
    """With fewer, too little KV left the GPU for the answers to prove anything. Mixed steps need none: with two batches
    few of them prefetch."""

    def num_unlike(self, other: "Run") -> int:
        """Return how many prompts have other answers there."""
        return sum(answer != theirs for answer, theirs in zip(self.answers, other.answers, strict=True))

    @property
    def num_not_finite(self) -> int:
        return sum(not answer.is_finite for answer in self.answers)


def poison_part(controls: tuple[Run, Run], poisoned: Run) -> CheckPart:
    """Judge a run with poison under its prefetches by two runs of the same steps without it."""
    first, second = controls
    count = len(first.answers)
    differs, unlike = first.num_unlike(second), poisoned.num_unlike(first)
    if poisoned.num_not_finite > max(first.num_not_finite, second.num_not_finite):
        verdict = Verdict.FAILED
        detail = f"{poisoned.num_not_finite} of {count} prompts read KV that had not arrived (NaN)"
    elif differs:
        verdict = Verdict.INCONCLUSIVE
        detail = f"without poison {differs} of {count} prompts differ between two runs of the same steps"
    elif unlike:
        verdict, detail = (
            Verdict.FAILED,
            f"{unlike} of {count} prompts differ from the same steps without poison",
        )
    elif first.num_not_finite:
        verdict = Verdict.INCONCLUSIVE
        detail = f"{first.num_not_finite} of {count} answers are NaN without poison too"
    elif poisoned.prefetches < poisoned.least_prefetches:
        verdict, detail = Verdict.INCONCLUSIVE, "too few requests left the GPU"
    else:
        verdict, detail = Verdict.PASSED, f"{count} of {count} prompts the same as without poison"
    return CheckPart(name=POISON, verdict=verdict, detail=f"{detail}; {poisoned.moved}")


def tokens_part(controls: tuple[Run, Run], runs: Mapping[str, Run], faulty: Run) -> CheckPart:
    """Judge runs under PipeMax, by name, by two runs of stock vLLM in different batches.

    ``faulty`` is one that prefetched wrong blocks on purpose.
    """
    first, second = controls
    count = len(first.answers)
    differs, seen = first.num_unlike(second), faulty.num_unlike(first)
    unlike = {name: num for name, run in runs.items() if (num := run.num_unlike(first))}
    if differs:
        verdict = Verdict.INCONCLUSIVE
        detail = f"stock vLLM itself differs between two batch sizes in {differs} of {count} prompts"
    elif unlike:
        verdict = Verdict.FAILED
        unlike_runs = ", ".join(f"{num} of {count} {name}" for name, num in unlike.items())
        detail = f"prompts that differ from stock vLLM's: {unlike_runs}"
    elif not seen:
        verdict = Verdict.INCONCLUSIVE
        detail = f"prefetches of wrong blocks changed none of {count} prompts, so the comparison sees nothing"
    elif any(run.prefetches < run.least_prefetches for run in runs.values()):
        verdict, detail = Verdict.INCONCLUSIVE, "too few requests left the GPU"
    else:
        verdict = Verdict.PASSED
        detail = (
            f"{count} of {count} prompts the same as stock vLLM's; wrong blocks, on purpose, changed {seen}"
        )
    moved = ", ".join(f"{name} {run.moved}" for name, run in runs.items())
    return CheckPart(name=TOKENS, verdict=verdict, detail=f"{detail}; {moved}")
