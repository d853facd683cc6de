"""Shared prefixes on the GPU: which requests may share one, and which must stay because the plan shares theirs.

A prefix may be shared from the plan after the step that computed or copied it, provided that nothing of that step was
refused. Until then another request with the same prefix takes a copy of its own.
"""

from pipemax.control.state.block_needs import BlockNeeds
from pipemax.control.state.ledger import BlockPool, SharedBlocks
from pipemax.control.state.live_requests import LiveRequests
from pipemax.control.state.request_state import Place, RequestState
from pipemax.domain.request import PrefixId, RequestSpec
from pipemax.domain.units import RequestId


class SharedPrefixes:
    """The sharing of prefixes in the plan being made.

    Invariant: a prefix is in the GPU pool's books only if its tokens are all computed or copied there.
    """

    def __init__(self, gpu: BlockPool, needs: BlockNeeds, requests: LiveRequests, block_tokens: int) -> None:
        self._gpu = gpu
        self._needs = needs
        self._requests = requests
        self._block_tokens = block_tokens
        self._num_tokens: dict[PrefixId, int] = {}
        self._providers: set[RequestId] = set()
        self._filled: list[RequestState] = []  # filled by the step planned last, unless refused

    def declare(self, spec: RequestSpec) -> SharedBlocks | None:
        """Return the whole blocks that a new request can share; None without any.

        At least one token of a prompt is always computed. Raise ``ValueError`` if the prefix had another length before.
        """
        if spec.prefix is None:
            return None
        known = self._num_tokens.setdefault(spec.prefix.prefix_id, spec.prefix.num_tokens)
        if known != spec.prefix.num_tokens:
            raise ValueError(
                f"request {spec.request_id}: prefix {spec.prefix.prefix_id} has {known} tokens, "
                f"not {spec.prefix.num_tokens}"
            )
        num_blocks = spec.prefix.num_tokens // self._block_tokens
        if num_blocks == 0 or spec.prompt_tokens <= num_blocks * self._block_tokens:
            return None
        return SharedBlocks(spec.prefix.prefix_id, num_blocks)

    def share(self, state: RequestState) -> SharedBlocks | None:
        """Return the prefix that a request finds on the GPU, and keep its provider there for this plan.

        A plan's evictions are carried out first, so the provider must not be among them.
        """
        if state.shared is None or not self._needs.finds_prefix(state):
            return None
        self._providers.add(self._gpu.prefix_holder(state.shared.prefix_id))
        return state.shared

    def is_provider(self, state: RequestState) -> bool:
        """Return whether a request in the plan being made shares the prefix that this one holds."""
        return state.id in self._providers

    def note_filled(self, state: RequestState) -> None:
        """Note that the step being planned computes or copies KV of a request, perhaps the last of its prefix."""
        if state.shared is not None:
            self._filled.append(state)

    def publish(self) -> None:
        """Let the prefixes be shared that the step planned last filled. Call before each plan."""
        for state in self._filled:
            is_on_gpu = state.id in self._gpu and state.place is not Place.PREFETCHING
            is_complete = state.computed_tokens >= state.num_shared_blocks * self._block_tokens
            if state.shared and is_on_gpu and is_complete and self._requests.find(state.id) is state:
                self._gpu.publish(state.id, state.shared)
        self._filled.clear()
        self._providers.clear()
