"""The controller's configuration: pools, stages, and the policy's thresholds."""

from dataclasses import dataclass

from pipemax.domain import tuned
from pipemax.domain.kv_groups import WHOLE_KV, KvGroups
from pipemax.domain.plan import Batching
from pipemax.domain.step_times import DECODE_SHARES, StepTimeModel

HOST_HIGH_WATERMARK = 0.95
"""Share of the host pool that prefill fills, unless told otherwise."""


def usual_num_batches(num_stages: int, max_steps_in_flight: int) -> int:
    """Return how many decode batches keep all stages busy.

    That is as many as steps can be in flight; but where that is one more than there are stages, as many as stages, for
    the step after is planned with tokens still on their way (``DecodePlanner``). With n batches a batch holds
    M/n + p(1 − 2/n) of a pool M, if p can be prefetched in a step: one batch more than needed holds less.
    """
    if max_steps_in_flight > num_stages > 1:
        return num_stages
    return max(2, max_steps_in_flight)


def waves_refusal(num_batches: int, kv_groups: KvGroups) -> str | None:
    """Return why no batch may be overwritten while it computes, as the rest of a sentence about waves, or None."""
    if num_batches < 2:
        return "need at least 2 batches (num_batches): one batch would overwrite what it runs next"
    if kv_groups != WHOLE_KV:
        return "need the whole KV of every layer: windows free blocks as they move on"
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class StageConfig:
    """One pipeline stage as the controller sees it."""

    kv_bytes_per_token: int
    """KV of one token on this stage: its layers only. κ_s of the budget."""
    h2d_bytes_per_s: float
    """B_s: host → GPU, in the paged format, measured while the GPU computes (PipeMax, Equation 7)."""
    decode_time: StepTimeModel
    """Seconds of a decode step by batch size and KV tokens attended to."""
    prefill_time: StepTimeModel
    """Seconds of a prefill step by chunk tokens and (token, attended token) pairs."""
    mixed_scales: tuple[float, ...] = (1.0,)
    """What prompt tokens add to a step that also decodes, as a multiple of what they add to a prefill step: one for
    all steps, or one for each of ``step_times.DECODE_SHARES``."""

    def __post_init__(self) -> None:
        if self.kv_bytes_per_token < 1 or self.h2d_bytes_per_s <= 0:
            raise ValueError(f"kv_bytes_per_token and h2d_bytes_per_s must be positive: {self}")
        if len(self.mixed_scales) not in (1, len(DECODE_SHARES)) or min(self.mixed_scales) <= 0:
            raise ValueError(f"mixed_scales has 1 or {len(DECODE_SHARES)} positive numbers: {self}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerConfig:
    """Everything that a plan depends on, apart from the events."""

    num_batches: int
    """n: decode batches in rotation; at least the number of stages, else steps are empty (``usual_num_batches``)."""
    stages: tuple[StageConfig, ...]
    gpu_blocks: int
    """KV blocks of each GPU's pool (the same on all stages)."""
    host_blocks: int
    """KV blocks of the host pool, which holds a replica of every live request."""
    block_tokens: int = 16
    kv_groups: KvGroups = WHOLE_KV
    """The block tables of a request. With windows whose older blocks are freed, no prefixes are shared."""
    max_num_seqs: int = 1024
    """Maximum number of requests in one step."""
    max_resident_requests: int = 8192
    """Maximum number of requests with KV on the GPU: the runner's slots."""
    prefill_chunk_tokens: int = 2048
    """Tokens of one prefill step. Equal steps keep all stages busy; PipeMax, Appendix A.1, asks only that the first
    stage is busy, not that steps are equal."""

    whole_prompts: bool = False
    """No prompt is cut: for engines whose attention cannot go on with a prompt. Only with separated batching, and with
    steps that hold the longest prompt."""

    batching: Batching = Batching.SEPARATED
    mixed_step_tokens: int | None = None
    """Mixed batching: maximum tokens of a step, decodes and prompts together; None takes ``prefill_chunk_tokens``.
    Steps become smaller as live KV grows (``PromptThrottle``)."""
    mixed_live_watermark: float = tuned.MIXED_LIVE_WATERMARK
    """Mixed batching: no prompt is begun while live KV is above this many GPU pools. One pool is on the GPU, up to half
    a pool for each batch was evicted with its step still in flight, and the prefetch chooses from the rest. With one
    batch nothing is overwritten, and the maximum is 1.0."""

    host_high_watermark: float = HOST_HIGH_WATERMARK
    """Prefill admits up to this share of the host pool; the rest is headroom for decode growth."""
    gpu_low_watermark: float = tuned.GPU_LOW_WATERMARK
    """Return to prefill once live KV is below this many GPU pools. PipeMax, §3.1.3, has 1.0; but what was evicted in
    the last n steps is still in flight, and the prefetch runs out of choice before live KV is that low."""
    min_refill_fraction: float = 0.1
    """Hysteresis: return to prefill only if this share of the host pool can be filled, or all that waits fits."""
    initial_output_tokens: int | None = None
    """Output length assumed at admission until requests have finished; None is each request's max_tokens."""
    input_grace_s: float = 1.0
    """With input open, how long a prefill phase waits for the next request before it decodes."""

    wave_groups: int | None = None
    """Waves: what is prefetched overwrites members of the batch that executes, behind its computation, in this many
    groups of a stage's layers; None overwrites D_k, before the step. Not in the paper. See ``planners.prefetch``."""

    max_prefetch_requests: int = tuned.MAX_PREFETCH_REQUESTS
    """Maximum number of requests prefetched in one step. Each request costs the scheduler and the workers time, and a
    budget filled with few long requests gives the same throughput as one filled with many short ones."""
    balance_tolerance: float = 0.02
    """Residents move to a lighter batch once a batch's time exceeds the mean by this share."""
    warm_up_growth: float = 0.05
    """Warm-up: how far the next batch's predicted time may exceed the executing one's, as a share of it."""
    steady_window: int = tuned.STEADY_WINDOW
    """w: iterations over which the budget's variation is taken."""
    steady_threshold: float = tuned.STEADY_THRESHOLD
    """Steady once (max − min) / mean of the budget within the window is below this."""
    max_exchanges: int = 32
    """Refinement steps of GreedySelect."""
    exchange_tolerance: float = 0.01
    """Refinement stops once the mismatch is below this share of the predicted step time."""
    overdue_iterations: int = tuned.OVERDUE_ITERATIONS
    """A parked request older than this is prefetched ahead of others…"""
    overdue_budget_fraction: float = tuned.OVERDUE_BUDGET_FRACTION
    """…within this share of the budget; so is a request longer than the budget, over several iterations. With two
    batches or more, no request waits longer than ``overdue_iterations`` and then as many iterations as this share of
    their budgets needs to copy the host pool twice (tests/property/test_waiting.py)."""

    def __post_init__(self) -> None:
        counts = {
            "num_batches": self.num_batches,
            "gpu_blocks": self.gpu_blocks,
            "host_blocks": self.host_blocks,
            "block_tokens": self.block_tokens,
            "max_num_seqs": self.max_num_seqs,
            "max_resident_requests": self.max_resident_requests,
            "prefill_chunk_tokens": self.prefill_chunk_tokens,
            "mixed_step_tokens": self.step_tokens,
            "max_prefetch_requests": self.max_prefetch_requests,
            "steady_window": self.steady_window,
            "overdue_iterations": self.overdue_iterations,
        }
        for name, count in counts.items():
            if count < 1:
                raise ValueError(f"{name} must be at least 1, not {count}")
        if self.whole_prompts and self.batching is not Batching.SEPARATED:
            raise ValueError(
                "whole_prompts needs separated batching: a mixed step may be too short for a prompt"
            )
        if self.wave_groups is not None:
            self._check_waves(self.wave_groups)
        if not self.stages:
            raise ValueError("stages must name at least one pipeline stage")
        shares = {
            "host_high_watermark": self.host_high_watermark,
            "overdue_budget_fraction": self.overdue_budget_fraction,
        }
        for name, share in shares.items():
            if not 0 < share <= 1:
                raise ValueError(f"{name} must be in (0, 1], not {share}")
        for name in ("gpu_low_watermark", "mixed_live_watermark"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive, not {getattr(self, name)}")
        if not 0 <= self.min_refill_fraction < 1:
            raise ValueError(f"min_refill_fraction must be in [0, 1), not {self.min_refill_fraction}")
        if min(self.steady_threshold, self.exchange_tolerance, self.max_exchanges, self.input_grace_s) < 0:
            raise ValueError(
                "steady_threshold, exchange_tolerance, max_exchanges, input_grace_s: never negative"
            )

    def _check_waves(self, num_groups: int) -> None:
        if num_groups < 2:
            raise ValueError(
                f"wave_groups must be at least 2, not {num_groups}: copies into the only group would begin when the "
                "step has ended, and the next step would wait for them"
            )
        if (refusal := waves_refusal(self.num_batches, self.kv_groups)) is not None:
            raise ValueError(f"waves {refusal}")

    @property
    def step_tokens(self) -> int:
        """The maximum tokens of a mixed step."""
        return self.prefill_chunk_tokens if self.mixed_step_tokens is None else self.mixed_step_tokens

    @property
    def max_batch_requests(self) -> int:
        """The maximum number of requests in a decode batch."""
        if self.batching is Batching.SEPARATED:
            return self.max_num_seqs
        return min(self.max_num_seqs, self.step_tokens)

    @property
    def overwrites(self) -> bool:
        """Whether room is made in the batch D_k.

        With two batches D_k is D_j, whose members have just run: they change places with parked requests.
        """
        return self.num_batches > 1

    @property
    def max_on_gpu(self) -> int:
        """The maximum number of requests that hold GPU blocks: each needs a slot, and a place in some batch."""
        return min(self.max_resident_requests, self.num_batches * self.max_batch_requests)
