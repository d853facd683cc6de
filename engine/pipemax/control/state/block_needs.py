"""How many blocks a request needs, given what of its shared prefix is on the GPU. Pure: it changes nothing."""

from pipemax.control.state.ledger import Pools
from pipemax.control.state.request_state import RequestState
from pipemax.domain.kv_groups import KvGroups


class BlockNeeds:
    """Blocks by request and number of tokens; all counts are whole blocks of ``block_tokens`` tokens.

    A request has a table of blocks for each group of layers, and counts those of all tables.
    """

    def __init__(self, pools: Pools, block_tokens: int, groups: KvGroups) -> None:
        self._pools = pools
        self._block_tokens = block_tokens
        self._groups = groups
        self.changing_places = frozenset(
            {0, (groups.window_tokens - 1) % block_tokens} if groups.window else {0}
        )
        """Where the tokens of a sequence have one of these remainders by a block's size, its next token may need a
        block that the one before it did not, or one less."""

    def finds_prefix(self, state: RequestState) -> bool:
        """Return whether the request has a shared prefix and finds its blocks on the GPU."""
        return state.shared is not None and self._pools.gpu.holds_prefix(state.shared.prefix_id)

    def cached_prefix_tokens(self, state: RequestState) -> int:
        """Return how many tokens a prefill that has not begun finds computed on the GPU."""
        return state.num_shared_blocks * self._block_tokens if self.finds_prefix(state) else 0

    def first_missing_block(self, state: RequestState) -> int:
        """Return the first block of a parked request's replica that a prefetch must copy."""
        return state.num_shared_blocks if self.finds_prefix(state) else 0

    def most_blocks(self, num_tokens: int) -> int:
        """Return the most blocks that a request takes until it has this many tokens."""
        return self._groups.prompt_blocks(num_tokens, self._block_tokens, in_flight_tokens=0)

    def shares_prefixes(self) -> bool:
        """Return whether requests may share the blocks of a prefix: not where blocks leave windows."""
        return not self._groups.window

    def most_kv_tokens(self, num_tokens: int) -> int:
        """Return ``most_blocks`` in tokens: the tokens themselves, unless KV leaves windows."""
        return self.most_blocks(num_tokens) * self._block_tokens if self._groups.window else num_tokens

    def reserved_blocks(self, state: RequestState, num_tokens: int) -> int:
        """Return the blocks next to its shared prefix that it may take until it has ``num_tokens``."""
        return max(0, self.most_blocks(num_tokens) - state.num_shared_blocks)

    def own_blocks(self, state: RequestState, num_tokens: int) -> int:
        """Return the blocks next to its shared prefix that hold what is needed of its first ``num_tokens`` tokens."""
        return max(0, self._groups.kept_blocks(num_tokens, self._block_tokens) - state.num_shared_blocks)

    def own_blocks_with_next(self, state: RequestState) -> int:
        """Return the blocks next to its shared prefix that hold its KV and the slot of its next token."""
        tokens = state.computed_tokens
        return self._groups.step_blocks(tokens, tokens + 1, self._block_tokens) - state.num_shared_blocks

    def gpu_blocks(self, state: RequestState, first: int, end: int) -> int:
        """Return the GPU blocks in a step that computes tokens ``[first, end)`` that count as the request's own.

        A prefix that it holds together with others is left out; a copy of its own, which it may have computed before
        the prefix was published, is not.
        """
        return self._groups.step_blocks(first, end, self._block_tokens) - self._shared_on_gpu(state)

    def fitting_tokens(self, state: RequestState, first: int, num_blocks: int) -> int:
        """Return the end of the longest step from token ``first`` on for which it needs at most ``num_blocks``."""
        num_blocks += self._shared_on_gpu(state)
        return self._groups.fitting_tokens(first, num_blocks, self._block_tokens)

    def _shared_on_gpu(self, state: RequestState) -> int:
        gpu = self._pools.gpu
        sharing = gpu.shares(state.id) if state.id in gpu else self.finds_prefix(state)
        return state.num_shared_blocks if sharing else 0

    def prefetch_cost(self, state: RequestState) -> int:
        """Return the GPU blocks that a prefetch of a parked request takes: with its prefix unless that is there."""
        return self._pools.gpu.cost(state.blocks, state.shared)

    def growth_on_gpu(self, state: RequestState) -> int:
        """Return how many GPU blocks a resident's next token needs that the resident does not hold."""
        tokens = state.computed_tokens
        if tokens % self._block_tokens:
            return 0
        return max(0, self.gpu_blocks(state, tokens, tokens + 1) - self._pools.gpu.own_blocks(state.id))

    def growth_on_host(self, state: RequestState) -> int:
        """Return how many host blocks a resident's next token needs beyond those that the resident reserved."""
        if state.computed_tokens % self._block_tokens:
            return 0
        return max(0, state.blocks - self._pools.host.own_blocks(state.id))
