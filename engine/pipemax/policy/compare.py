"""The choice between PipeMax and stock vLLM, and from which gain on it falls on PipeMax."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from pipemax.domain.tuned import WORTHWHILE_GAIN


class ChosenPolicy(StrEnum):
    """The policy that an engine runs under."""

    PIPEMAX = "pipemax"
    VLLM = "vllm"


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyChoice:
    """The choice between PipeMax and stock vLLM, and the reason for it."""

    chosen: ChosenPolicy
    reason: str
    """One clause."""
    predicted_tokens_per_s: Mapping[str, float] = field(default_factory=dict)
    """Policy → tokens/s of prompts and outputs; empty if nothing had to be simulated."""
    inputs: Mapping[str, float | str] = field(default_factory=dict)
    """The inputs of the simulations."""
    settings: Mapping[str, int | str] = field(default_factory=dict)
    """Fields of the engine config with which the chosen policy was the fastest, where they are not the engine's own."""

    layout: str = ""
    """The layout of the machine's GPUs and why, in one clause; empty if there was nothing to choose."""

    @property
    def speedup(self) -> float:
        """The predicted ratio of PipeMax's rate to stock vLLM's."""
        return (
            self.predicted_tokens_per_s[ChosenPolicy.PIPEMAX] / self.predicted_tokens_per_s[ChosenPolicy.VLLM]
        )


def verdict(speedup: float, least_gain: float = WORTHWHILE_GAIN) -> tuple[ChosenPolicy, str]:
    """Return the policy for a predicted ratio of PipeMax's rate to stock vLLM's, and why in a few words.

    PipeMax is chosen from ``least_gain`` on.
    """
    faster = "is faster" if speedup >= 1 else "may be faster, for the lengths of outputs are a guess"
    if speedup >= least_gain:
        return ChosenPolicy.PIPEMAX, f"PipeMax {faster}"
    if least_gain > 1:
        return ChosenPolicy.VLLM, f"PipeMax gains less than {least_gain - 1:.0%}"
    return ChosenPolicy.VLLM, "stock vLLM is faster"
