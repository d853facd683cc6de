"""The part of a run before its drain: its rates, and where the stages' time went.

The module knows neither vLLM nor which scheduler ran.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class KvSample:
    """How much KV there is at one moment of a run, as shares of the pools that hold it."""

    time_s: float
    gpu: float
    """Blocks of requests, over the GPUs' blocks."""
    host: float
    """The same of the host's blocks; 0 for a scheduler that keeps nothing there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SteadyPart:
    """Figures of one engine until most of its requests had finished; shares are of the stages' time."""

    seconds: float
    tokens: int
    """Outputs made, and prompts that had ended."""
    prompts: float
    """Share of time in steps of prompt tokens only."""
    decode: float
    """Share of time in steps that only decode."""
    mixed: float
    """Share of time in steps that do both."""
    mean_decode_batch: float
    """Requests that a step decodes, mean over the steps that decode any."""
    host_bubble: float
    """Share of time in which the first stage has no step because the scheduler works."""
    host_to_gpu: float
    """Share of time in which a GPU's link carries KV from the host."""

    @property
    def idle(self) -> float:
        """Share of time in which a stage computes nothing."""
        return max(0.0, 1.0 - self.prompts - self.decode - self.mixed)

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds
