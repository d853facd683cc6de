"""A table in numbers: the statistics of its prompts' and outputs' lengths. No text, and no rows."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthStatistics:
    """The statistics of the lengths to draw, in tokens."""

    family: str
    """lognormal (mean above median), normal (truncated; otherwise), or mixture (many short, some long)."""
    mean: float
    median: float
    least: int
    most: int

    def __post_init__(self) -> None:
        if self.family not in ("lognormal", "normal", "mixture"):
            raise ValueError(f"family is {self.family!r}, must be lognormal, normal or mixture")
        if not 1 <= self.least <= self.median <= self.most or not self.least <= self.mean <= self.most:
            raise ValueError(
                f"mean and median must lie between least and most, and least be at least 1: {self}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadSpec:
    """A table's statistics."""

    name: str
    prompt: LengthStatistics
    output: LengthStatistics
    context_tokens: int
    """Maximum of prompt and output together; outputs are cut to fit."""
    shared_prefix_tokens: int
    """Leading tokens that all prompts have in common."""

    def __post_init__(self) -> None:
        if not 0 <= self.shared_prefix_tokens < self.prompt.least:
            raise ValueError(
                f"shared_prefix_tokens is {self.shared_prefix_tokens}, must be below the shortest prompt, "
                f"{self.prompt.least}"
            )
        if self.prompt.most >= self.context_tokens:
            raise ValueError(
                f"prompts of {self.prompt.most} do not fit into {self.context_tokens} with output"
            )
