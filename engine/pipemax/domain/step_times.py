"""The formula for how long a step takes on a stage: T̂ = α·b + β·L + δ (Section 3.3.1), in one line or several.

The same form serves prefill, with chunk tokens for the batch size b and (token, attended token) pairs for the KV tokens
L. ``pipemax.control.times`` fits and refines it.

A mixed step's time follows from both (``mixed_step_s``), with factors of its own (``mixed_scale``).
"""

from bisect import bisect_right
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """One line of the batch-size term: α·b + δ from ``min_size`` up to the next segment."""

    min_size: int
    alpha_s: float
    """Seconds per request (per token in prefill)."""
    delta_s: float
    """Seconds regardless of the batch size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimeModel:
    """Seconds of one step on one stage by batch size and KV tokens attended to; 0 for an empty batch."""

    segments: tuple[Segment, ...]
    """Segments by ascending ``min_size``, the first of which is 1."""
    beta_s: float
    """Seconds per KV token attended to (per pair in prefill)."""

    def __post_init__(self) -> None:
        sizes = [segment.min_size for segment in self.segments]
        if not sizes or sizes[0] != 1 or any(a >= b for a, b in pairwise(sizes)):
            raise ValueError(f"segments must start at sizes that ascend from 1, not {sizes}")
        if self.beta_s < 0:
            raise ValueError(f"beta_s must not be negative: {self.beta_s}")

    @classmethod
    def linear(cls, *, alpha_s: float, beta_s: float, delta_s: float) -> "StepTimeModel":
        """Return a model of one line, as in the paper."""
        return cls(segments=(Segment(min_size=1, alpha_s=alpha_s, delta_s=delta_s),), beta_s=beta_s)

    def segment_at(self, size: int) -> Segment:
        if len(self.segments) == 1:
            return self.segments[0]
        return self.segments[max(0, bisect_right(self.segments, size, key=lambda s: s.min_size) - 1)]

    def batch_s(self, size: int) -> float:
        """Return α·b + δ, the part without the KV. A noisy profile's line may fall below zero, but time does not."""
        if size == 0:
            return 0.0
        segment = self.segment_at(size)
        return max(0.0, segment.alpha_s * size + segment.delta_s)

    def seconds(self, size: int, kv_tokens: int) -> float:
        return self.batch_s(size) + self.beta_s * kv_tokens if size else 0.0

    def added_batch_s(self, size: int, more: int) -> float:
        """Return how many seconds ``more`` add to the part without the KV of a step of ``size``; never less than 0."""
        return max(0.0, self.batch_s(size + more) - self.batch_s(size))


DECODE_SHARES = (0.1, 0.3, 0.5, 0.7, 0.9)
"""Decodes' shares of a mixed step's tokens at which it may have scales of its own."""


def mixed_scale(scales: tuple[float, ...], num_decodes: int, prompt_tokens: int) -> float:
    """Return what prompt tokens add to a step that also decodes, as a multiple of what they add to a prefill step.

    ``scales``: one for all shares of decodes, or one for each of ``DECODE_SHARES``, between which it is linear. Without
    decodes it is 1.
    """
    if not num_decodes:
        return 1.0
    if len(scales) == 1:
        return scales[0]
    share = num_decodes / (num_decodes + prompt_tokens)
    place = (share - DECODE_SHARES[0]) / (DECODE_SHARES[1] - DECODE_SHARES[0])
    lower = min(len(scales) - 2, max(0, int(place)))
    weight = min(1.0, max(0.0, place - lower))
    return (1 - weight) * scales[lower] + weight * scales[lower + 1]


def mixed_step_s(
    decode: StepTimeModel,
    prefill: StepTimeModel,
    *,
    num_decodes: int,
    kv_tokens: int,
    prompt_tokens: int,
    token_pairs: int,
    mixed_scales: tuple[float, ...] = (1.0,),
) -> float:
    """Return the seconds of a step that decodes and computes prompt tokens.

    All tokens of a step pass the matrix products together, so the prompt tokens add what they add to a prefill step of
    as many tokens as there are decodes; each kind's attention comes on top. Without prompt tokens this is a decode
    step's time, without decodes a prefill step's. ``mixed_scales`` is what prompt tokens were measured to add to
    decodes, as a multiple of that, as in ``mixed_scale``.
    """
    added_s = prefill.added_batch_s(num_decodes, prompt_tokens) + prefill.beta_s * token_pairs
    scale = mixed_scale(mixed_scales, num_decodes, prompt_tokens)
    return decode.seconds(num_decodes, kv_tokens) + scale * added_s
