"""The plan of one step, by request ids only: ``Controller.plan_step`` returns it, an adapter carries it out.

An adapter works through a plan in this order: ``recompute``, ``evict``, ``prefetch`` (allocate, then queue the
copies), ``run``; if it overwrites blocks of what runs, ``run`` is allocated before ``prefetch``. It reports whatever it
could not do (``RunRefused``, ``PrefetchRefused``) before it asks for the next plan; whatever it does not report counts
as done. The plan already leaves room for everything in it, so a refusal means that the engine's pool and the
controller's counts differ.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import NewType

from pipemax.domain.units import RequestId

StepId = NewType("StepId", int)


class Batching(StrEnum):
    """Whether one step may hold both decodes and prompt tokens."""

    SEPARATED = "separated"  # phases of prefill and of decode (PipeMax, §3.1)
    MIXED = "mixed"  # each step decodes a batch and takes prompt tokens up to a maximum; not in the paper


class Phase(StrEnum):
    """What steps compute: prefill and decode are separated in time (Section 3.1), or every step may be mixed."""

    PREFILL = "prefill"
    DECODE = "decode"
    MIXED = "mixed"  # a batch decodes, and prompt tokens fill the step up


class PhaseReason(StrEnum):
    """Why a step is in its phase."""

    START = "start"  # nothing has run yet: requests must be prefilled first
    FILL_HOST = "fill_host"  # prefill: the host pool is below its high watermark and requests wait
    FINISH_PROMPTS = "finish_prompts"  # prefill: nothing more is admitted, started prompts are completed
    AWAIT_INPUT = "await_input"  # prefill: the host pool has room, more input was announced and is awaited
    HOST_FULL = "host_full"  # decode: the next waiting request would pass the high watermark
    INPUT_USED_UP = "input_used_up"  # decode: nothing waits
    LIVE_KV_LOW = "live_kv_low"  # prefill: live KV fell below the GPU's capacity and requests wait
    REST_FITS = "rest_fits"  # prefill: no more input will come, and all that waits fits into the host pool
    NOTHING_DECODABLE = "nothing_decodable"  # prefill: no request has a complete prompt
    KEEP_DECODING = "keep_decoding"  # decode: live KV still exceeds the GPU's capacity, or too little waits
    ENOUGH_PARKED = "enough_parked"  # mixed: live KV is above its watermark, so no prompt is begun


class PrefetchMode(StrEnum):
    """How the prefetched set P_t was chosen."""

    NONE = "none"
    WARM_UP = "warm_up"  # ShortFirstFill
    STEADY = "steady"  # GreedySelect with exchanges
    FORCED = "forced"  # nothing is running that a copy could hide behind: prefetch all the same
    STATIC = "static"  # a fixed share of the GPU's blocks, oldest first (the ablation)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefetch:
    """Copy of one request's blocks, host → GPU, during the step in which it is planned.

    Block numbers count within the request's sequence; the item covers [first_block, first_block + num_blocks). A
    request that fits into the budget comes in one item. A longer one comes in several, in consecutive order: the
    first allocates *all* of its GPU blocks (the reservation), each copies its part, and it may run in any step
    after the last. Blocks of a shared prefix that is on the GPU are not part of any item.
    """

    request_id: RequestId
    first_block: int
    num_blocks: int
    is_first: bool
    """Allocate GPU blocks for the whole sequence and its next token."""
    is_last: bool
    """The sequence is complete on the GPU after this item."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The inputs of one plan and the reason for it, which metrics and traces show."""

    reason: PhaseReason
    iteration: int = 0
    """t of the paper, counted since the last switch to decode, in mixed batching since the start; 0 in prefill."""
    executing_batch: int | None = None
    """i_t; None in prefill and if nothing runs."""
    next_batch: int | None = None
    """j_t: the batch that the prefetched requests join."""
    overwritten_batch: int | None = None
    """k_t: the batch from which requests are evicted first; with waves, i_t."""
    prefetch_mode: PrefetchMode = PrefetchMode.NONE
    predicted_step_s: float = 0.0
    """T̂ of the slowest stage for what runs in this step."""
    budget_blocks: int = 0
    """B·T̂ in blocks: the minimum over the stages."""
    prefetched_blocks: int = 0
    gap_s: float = 0.0
    """ΔT̂: how much less predicted time the next batch has than the executing one, before the prefetch."""
    run_kv_tokens: int = 0
    """L of the requests that run: every prefix token is counted for each request that attends to it."""
    num_waiting: int = 0
    num_parked: int = 0
    """Requests with their KV only on the host and nothing in flight."""
    num_resident: int = 0
    free_gpu_blocks: int = 0
    """After this plan."""
    free_host_blocks: int = 0
    """Not reserved, after this plan."""
    live_blocks: int = 0
    """KV of all live requests, in blocks, after this plan."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """One step. ``run`` may be empty: then it only moves KV, or waits for what is in flight."""

    step_id: StepId
    phase: Phase
    run: tuple[RequestId, ...] = ()
    run_tokens: tuple[int, ...] = ()
    """Tokens of each request in ``run``: 1 in decode, the chunk's length in prefill."""
    num_decodes: int | None = None
    """In a mixed step, how many requests of ``run`` decode: the first ones. The others compute prompt chunks."""
    evict: tuple[RequestId, ...] = ()
    """Free their GPU blocks; no copy, the host has them. They may be in flight, none is in ``run``."""
    overwrite: tuple[RequestId, ...] | None = None
    """Decodes of ``run`` that are evicted behind the step's computation, group of layers by group of layers; None
    without waves. ``prefetch`` may take their own blocks but the last, which the step writes to: the copies into a
    group of layers begin when the step has computed that group. The last block and a shared prefix are free from the
    next plan on."""
    recompute: tuple[RequestId, ...] = ()
    """Last resort: drop both copies; each request is prefilled again with its prompt and its output so far."""
    prefetch: tuple[Prefetch, ...] = ()
    wait_until_s: float | None = None
    """Set if a step is empty because input is awaited: plan again at the next event or at this time."""
    decision: Decision

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to carry out, so that the adapter waits for an event."""
        return not (self.run or self.evict or self.recompute or self.prefetch)
