"""One live request as the controller keeps it. Only the classes of this package write to it."""

from dataclasses import dataclass
from enum import Enum

from pipemax.control.state.ledger import SharedBlocks
from pipemax.domain.request import RequestSpec
from pipemax.domain.units import RequestId


class Place(Enum):
    """Where a request's KV is."""

    WAITING = "waiting"  # nowhere
    PREFILLING = "prefilling"  # prompt incomplete; on GPU and host as far as it goes
    RESIDENT = "resident"  # on GPU and host; member of a batch
    PREFETCHING = "prefetching"  # on the host; on the GPU only in part, under a reservation
    PARKED = "parked"  # on the host only


@dataclass(slots=True, eq=False)
class RequestState:
    """One live request. Its counts include steps in flight: a plan counts as carried out once it is returned."""

    spec: RequestSpec
    id: RequestId
    shared: SharedBlocks | None
    target_tokens: int
    """Tokens whose KV a prefill must compute: the prompt, and after a recompute the output so far as well."""
    expected_kv_tokens: int
    """The KV tokens, apart from its shared prefix, that it was forecast at admission to hold at its end: what it counts
    for while it waits."""
    place: Place = Place.WAITING
    computed_tokens: int = 0
    cached_tokens: int = 0
    """Tokens of its shared prefix that were on the GPU already when its prefill began: it began behind them."""
    blocks: int = 0
    """Blocks it needs apart from its shared prefix, its next token's slot included; the key of every index."""
    output_tokens: int = 0
    num_in_flight: int = 0
    last_step: int = 0
    """The number, among the steps of which something ran, of the last one planned for it."""
    life: int = 0
    """Incremented when its KV is dropped: steps in flight from before then no longer concern it."""
    num_recomputes: int = 0
    is_deferred: bool = False
    """Moved to a batch that runs later, and has not run since."""
    parked_at: int = 0
    """The step in which it was parked with nothing in flight."""
    prefetched_blocks: int = 0
    """While PREFETCHING: blocks [0, prefetched_blocks) were copied."""

    @property
    def max_kv_tokens(self) -> int:
        return self.spec.max_kv_tokens

    @property
    def num_shared_blocks(self) -> int:
        return self.shared.num_blocks if self.shared else 0
