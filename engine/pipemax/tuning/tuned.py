"""The result of a tuning, and how it is said in one line."""

import math
from dataclasses import dataclass

from pipemax.domain.step_records import StepLimits
from pipemax.tuning.race import Estimate


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuned:
    """The limits on which a tuning settled, and what they were seen to gain over vLLM's default."""

    limits: StepLimits
    is_default: bool
    gain: Estimate | None
    """Measured, as the logarithm of a ratio of rates; ``None`` where nothing was raced."""
    predicted_gain: float | None
    """Simulated, as the logarithm of a ratio of rates; ``None`` where nothing was simulated."""
    seconds: float
    """Of the table, from the first step to the last that was part of the tuning."""
    pairs: int
    """Pairs of blocks that were raced, of all rivals together."""
    why: str
    """Why the tuning ended."""

    def __str__(self) -> str:
        rows = f"steps of {self.limits.step_tokens:,}, {self.limits.running_rows:,} rows"
        spent = f"{self.seconds / 60:.0f} min" if self.seconds >= 90 else f"{self.seconds:.0f} s"
        if self.is_default:
            return f"Tuned: {rows}, vLLM's default: {self.why}; {spent}"
        return f"Tuned: {rows}; {self._gain()} over vLLM's default; {spent}"

    def _gain(self) -> str:
        if self.gain is not None:
            return gain_text(self.gain)
        if self.predicted_gain is not None:
            return f"{_percent(self.predicted_gain):+.1f} % (simulated, not raced)"
        return "not compared"


def gain_text(gain: Estimate) -> str:
    """Return a gain with its interval, as "+3.1 % (1.2 … 5.0)"."""
    return f"{_percent(gain.mean):+.1f} % ({_percent(gain.low):.1f} … {_percent(gain.high):.1f})"


def _percent(log_ratio: float) -> float:
    return 100 * math.expm1(log_ratio)
