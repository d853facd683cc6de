"""The events that ``Controller.apply`` is given, in the order in which they happened.

The contract between controller and adapter: a plan counts as carried out when it is returned, except for what a
refusal takes back before the next plan is asked for. Several steps may be planned before the first one's
``StepCompleted`` arrives; steps complete in the order in which they were planned.
"""

from dataclasses import dataclass

from pipemax.domain.plan import StepId
from pipemax.domain.request import RequestSpec
from pipemax.domain.units import RequestId


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestAdmitted:
    """A request joins the waiting queue. Raises ``ValueError`` if it could never fit, or its id is live."""

    request: RequestSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestAborted:
    """The caller gave up a request, wherever it is, even in flight. An id no longer known is ignored."""

    request_id: RequestId


@dataclass(frozen=True, slots=True, kw_only=True)
class InputOpened:
    """More requests will come: a prefill phase waits for them (for ``input_grace_s``) while memory allows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InputEnded:
    """No more requests are expected, as before the first ``InputOpened``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixCacheHit:
    """The engine found the first ``num_tokens`` of a prompt on the GPU when it first scheduled it in ``step_id``.

    The planned chunk begins behind these tokens and is cut at the prompt's end; all of them then count as computed.
    """

    step_id: StepId
    request_id: RequestId
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRefused:
    """The engine did not run a request that ``step_id`` named; the request is as it was before."""

    step_id: StepId
    request_id: RequestId


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefetchRefused:
    """The engine had no GPU blocks for a prefetch; the request is only on the host, as it was before.

    Only a prefetch's first part may be refused: it takes the blocks of all its parts. From then on other requests may
    share the prefix that this one found.
    """

    step_id: StepId
    request_id: RequestId


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestPreempted:
    """The engine itself dropped both copies of a request's KV; the request is prefilled again."""

    request_id: RequestId


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCompleted:
    """A step's outputs came back: each request it ran has its planned tokens' KV in both pools.

    A decode step, and the last chunk of a prompt, also gave each request one output token.
    """

    step_id: StepId
    finished: tuple[RequestId, ...] = ()
    """Requests that ended with the step: by stop token, stop string or max_tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimed:
    """How long each stage computed for a step; may come long after ``StepCompleted``, or never."""

    step_id: StepId
    stage_s: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferTimed:
    """How long each stage took to copy a step's prefetched blocks, host → GPU, while it computed."""

    step_id: StepId
    num_blocks: int
    stage_s: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuBlocksObserved:
    """The engine's count of free GPU blocks once the last plan was carried out.

    It differs from the controller's where the engine frees later or shares more than the controller knows: an
    adapter whose engine does either reports it after each plan.
    """

    num_free: int


Event = (
    RequestAdmitted
    | RequestAborted
    | InputOpened
    | InputEnded
    | PrefixCacheHit
    | RunRefused
    | PrefetchRefused
    | RequestPreempted
    | StepCompleted
    | StepTimed
    | TransferTimed
    | GpuBlocksObserved
)
