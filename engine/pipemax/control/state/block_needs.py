"""How many blocks a request needs, given what of its shared prefix is on the GPU. Pure: it changes nothing."""

from pipemax.control.state.ledger import Pools
from pipemax.control.state.request_state import RequestState
from pipemax.domain.units import ceil_div


class BlockNeeds:
    """Blocks by request and number of tokens; all counts are whole blocks of ``block_tokens`` tokens."""

    def __init__(self, pools: Pools, block_tokens: int) -> None:
        self._pools = pools
        self._block_tokens = block_tokens

    def finds_prefix(self, state: RequestState) -> bool:
        """Return whether the request has a shared prefix and finds its blocks on the GPU."""
        return state.shared is not None and self._pools.gpu.holds_prefix(state.shared.prefix_id)

    def cached_prefix_tokens(self, state: RequestState) -> int:
        """Return how many tokens a prefill that has not begun finds computed on the GPU."""
        return state.num_shared_blocks * self._block_tokens if self.finds_prefix(state) else 0

    def first_missing_block(self, state: RequestState) -> int:
        """Return the first block of a parked request's sequence that a prefetch must copy."""
        return state.num_shared_blocks if self.finds_prefix(state) else 0

    def own_blocks(self, state: RequestState, num_tokens: int) -> int:
        """Return the blocks next to its shared prefix that hold the first ``num_tokens`` tokens."""
        return max(0, ceil_div(num_tokens, self._block_tokens) - state.num_shared_blocks)

    def own_blocks_with_next(self, state: RequestState) -> int:
        """Return the blocks next to its shared prefix that hold its KV and the slot of its next token."""
        return state.computed_tokens // self._block_tokens + 1 - state.num_shared_blocks

    def gpu_blocks(self, state: RequestState, num_tokens: int) -> int:
        """Return the GPU blocks of ``num_tokens`` tokens that count as the request's own.

        A prefix that it holds together with others is left out; a copy of its own, which it may have computed before
        the prefix was published, is not.
        """
        gpu = self._pools.gpu
        sharing = gpu.shares(state.id) if state.id in gpu else self.finds_prefix(state)
        return ceil_div(num_tokens, self._block_tokens) - (state.num_shared_blocks if sharing else 0)

    def prefetch_cost(self, state: RequestState) -> int:
        """Return the GPU blocks that a prefetch of a parked request takes: with its prefix unless that is there."""
        return self._pools.gpu.cost(state.blocks, state.shared)

    def grows_on_gpu(self, state: RequestState) -> bool:
        """Return whether a resident's next token needs a GPU block that the resident does not hold."""
        if state.computed_tokens % self._block_tokens:
            return False
        return self._pools.gpu.own_blocks(state.id) < self.gpu_blocks(state, state.computed_tokens + 1)

    def grows_on_host(self, state: RequestState) -> bool:
        """Return whether a resident's next token needs more host blocks than the resident reserved."""
        return (
            state.computed_tokens % self._block_tokens == 0
            and self._pools.host.own_blocks(state.id) < state.blocks
        )
