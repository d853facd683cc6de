"""Blocks: how many each request holds on the GPU, holds live and has reserved on the host, and how many it needs.

The ledger keeps counts, never block ids, in three pools of one kind. ``gpu`` counts the blocks that residents hold
(only vLLM knows their ids). ``host`` counts reservations: what a request may grow into without asking. ``live`` counts
the KV that exists, always within the reservations. A shared prefix is counted once per pool, for as long as any request
holds it. On the GPU that is so only once the prefix was published, that is, after the step that computed or copied it;
until then another request can only hold a copy of its own. Every change either happens whole or raises and has changed
nothing.
"""

from collections.abc import Callable

from pipemax.control.state.request import Place, RequestState, SharedBlocks
from pipemax.domain.errors import PoolExhaustedError
from pipemax.domain.kv_groups import KvGroups
from pipemax.domain.request import PrefixId, RequestSpec
from pipemax.domain.units import RequestId


class _Group:
    """A shared prefix within one pool."""

    __slots__ = ("holders", "num_blocks")

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.holders: dict[RequestId, None] = {}


class BlockPool:
    """The count of one pool."""

    def __init__(self, name: str, num_blocks: int) -> None:
        self.name = name
        self.num_blocks = num_blocks
        self._own_blocks: dict[RequestId, int] = {}
        self._shared: dict[RequestId, SharedBlocks] = {}
        self._groups: dict[PrefixId, _Group] = {}
        self._used = 0
        self._unaccounted = 0  # blocks in use by the engine's count that ours does not have

    def __contains__(self, request_id: RequestId) -> bool:
        return request_id in self._own_blocks

    def __len__(self) -> int:
        return len(self._own_blocks)

    @property
    def num_used(self) -> int:
        """The blocks held by requests, each shared prefix counted once."""
        return self._used

    @property
    def num_free(self) -> int:
        """The free blocks; negative if the engine holds, or shares unknown to us, more than fits next to our count."""
        return self.num_blocks - self._used - self._unaccounted

    def own_blocks(self, request_id: RequestId) -> int:
        """Return the blocks that a request holds apart from its shared prefix; ``KeyError`` if it holds none."""
        return self._own_blocks[request_id]

    def prefix_holder(self, prefix_id: PrefixId) -> RequestId:
        """Return the request that has held a shared prefix longest; ``KeyError`` if none holds it."""
        return next(iter(self._groups[prefix_id].holders))

    def holds_prefix(self, prefix_id: PrefixId) -> bool:
        return prefix_id in self._groups

    def shares(self, request_id: RequestId) -> bool:
        """Return whether a request holds its prefix together with others, rather than a copy of its own or none."""
        return request_id in self._shared

    def cost(self, own_blocks: int, shared: SharedBlocks | None) -> int:
        """Return the blocks that ``take`` would use up now."""
        if shared is None or shared.prefix_id in self._groups:
            return own_blocks
        return own_blocks + shared.num_blocks

    def take(self, request_id: RequestId, own_blocks: int, shared: SharedBlocks | None) -> None:
        assert request_id not in self._own_blocks, (self.name, request_id)
        cost = self.cost(own_blocks, shared)
        self._require(request_id, cost)
        if shared is not None:
            group = self._groups.setdefault(shared.prefix_id, _Group(shared.num_blocks))
            group.holders[request_id] = None
            self._shared[request_id] = shared
        self._own_blocks[request_id] = own_blocks
        self._used += cost

    def publish(self, request_id: RequestId, shared: SharedBlocks) -> None:
        """Let others share the prefix among a request's own blocks from now on; no effect if another's is shared."""
        if shared.prefix_id in self._groups or request_id in self._shared:
            return
        self._own_blocks[request_id] -= shared.num_blocks
        self._shared[request_id] = shared
        self._groups[shared.prefix_id] = group = _Group(shared.num_blocks)
        group.holders[request_id] = None

    def resize(self, request_id: RequestId, own_blocks: int) -> None:
        """Grow or shrink what a request holds apart from its shared prefix."""
        more = own_blocks - self._own_blocks[request_id]
        if more > 0:
            self._require(request_id, more)
        self._own_blocks[request_id] = own_blocks
        self._used += more

    def release(self, request_id: RequestId) -> int:
        """Release everything that a request holds; return the number of blocks that became free."""
        freed = self._own_blocks.pop(request_id)
        shared = self._shared.pop(request_id, None)
        if shared is not None:
            group = self._groups[shared.prefix_id]
            del group.holders[request_id]
            if not group.holders:
                freed += group.num_blocks
                del self._groups[shared.prefix_id]
        self._used -= freed
        return freed

    def observe_free(self, num_free: int) -> None:
        """Adopt the owner's count if it has fewer free blocks than ours; the difference is kept separately.

        If the owner has more free blocks, its requests share more than we know. That ends, unseen, when they leave.
        """
        self._unaccounted = max(0, self.num_blocks - self._used - num_free)

    def observe_resize(self, request_id: RequestId, own_blocks: int) -> None:
        """Resize a request as its owner already did, whatever our count says is free."""
        self._used += own_blocks - self._own_blocks[request_id]
        self._own_blocks[request_id] = own_blocks

    def _require(self, request_id: RequestId, num_blocks: int) -> None:
        if num_blocks > self.num_free:
            raise PoolExhaustedError(
                f"{self.name} pool: request {request_id} needs {num_blocks} blocks, {self.num_free} of "
                f"{self.num_blocks} are free"
            )

    def check_integrity(self) -> None:
        """Recount the blocks: free + held + unaccounted = pool. Raise ``AssertionError`` if they differ."""
        holders: dict[PrefixId, set[RequestId]] = {}
        for request_id, shared in self._shared.items():
            holders.setdefault(shared.prefix_id, set()).add(request_id)
        counted = {prefix_id: set(group.holders) for prefix_id, group in self._groups.items()}
        assert holders == counted, (self.name, holders, counted)
        assert all(num_own >= 0 for num_own in self._own_blocks.values()), (self.name, self._own_blocks)
        held = sum(self._own_blocks.values()) + sum(group.num_blocks for group in self._groups.values())
        assert held == self._used, (self.name, held, self._used)
        assert self.num_free + self._used + self._unaccounted == self.num_blocks, self.name
        assert self.num_free <= self.num_blocks, (self.name, self.num_free)


class Ledger:
    """The three pools, and the changes that keep them consistent with each other."""

    def __init__(self, *, gpu_blocks: int, host_blocks: int) -> None:
        self.gpu = BlockPool("GPU", gpu_blocks)
        self.host = BlockPool("host", host_blocks)
        self.live = BlockPool("live KV", host_blocks)

    def reserve(self, request_id: RequestId, own_blocks: int, shared: SharedBlocks | None) -> None:
        """Reserve host blocks for a request about to be prefilled."""
        self.host.take(request_id, own_blocks, shared)
        self.live.take(request_id, 0, shared)

    def set_live(self, request_id: RequestId, own_blocks: int) -> None:
        """Set how much KV a request has, after it grew or was taken back; its reservation grows with it if it must."""
        if own_blocks > self.host.own_blocks(request_id):
            self.host.resize(request_id, own_blocks)
        self.live.resize(request_id, own_blocks)

    def release(self, request_id: RequestId) -> None:
        """Forget a request in every pool that knows it."""
        for pool in (self.gpu, self.host, self.live):
            if request_id in pool:
                pool.release(request_id)

    def check_integrity(self) -> None:
        for pool in (self.gpu, self.host, self.live):
            pool.check_integrity()
        assert self.host._own_blocks.keys() == self.live._own_blocks.keys(), (
            "reserved and live requests differ"
        )
        for request_id, num_own in self.live._own_blocks.items():
            assert num_own <= self.host.own_blocks(request_id), (request_id, num_own)
        for request_id in self.gpu._own_blocks:
            assert request_id in self.host, f"{request_id} is on the GPU without a place on the host"


class BlockNeeds:
    """How many blocks a request needs, given what of its shared prefix is on the GPU. It changes nothing.

    All counts are whole blocks of ``block_tokens`` tokens.

    A request has a table of blocks for each group of layers, and counts those of all tables.
    """

    def __init__(self, ledger: Ledger, block_tokens: int, groups: KvGroups) -> None:
        self._ledger = ledger
        self._block_tokens = block_tokens
        self._groups = groups
        self.changing_places = frozenset(
            {0, (groups.window_tokens - 1) % block_tokens} if groups.window else {0}
        )
        """Where the tokens of a sequence have one of these remainders by a block's size, its next token may need a
        block that the one before it did not, or one less."""

    def finds_prefix(self, state: RequestState) -> bool:
        """Return whether the request has a shared prefix and finds its blocks on the GPU."""
        return state.shared is not None and self._ledger.gpu.holds_prefix(state.shared.prefix_id)

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
        gpu = self._ledger.gpu
        sharing = gpu.shares(state.id) if state.id in gpu else self.finds_prefix(state)
        return state.num_shared_blocks if sharing else 0

    def prefetch_cost(self, state: RequestState) -> int:
        """Return the GPU blocks that a prefetch of a parked request takes: with its prefix unless that is there."""
        return self._ledger.gpu.cost(state.blocks, state.shared)

    def growth_on_gpu(self, state: RequestState) -> int:
        """Return how many GPU blocks a resident's next token needs that the resident does not hold."""
        tokens = state.computed_tokens
        if tokens % self._block_tokens:
            return 0
        return max(0, self.gpu_blocks(state, tokens, tokens + 1) - self._ledger.gpu.own_blocks(state.id))

    def growth_on_host(self, state: RequestState) -> int:
        """Return how many host blocks a resident's next token needs beyond those that the resident reserved."""
        if state.computed_tokens % self._block_tokens:
            return 0
        return max(0, state.blocks - self._ledger.host.own_blocks(state.id))


class SharedPrefixes:
    """Which requests may share a prefix on the GPU, and which must stay because the plan being made shares theirs.

    A prefix may be shared from the plan after the step that computed or copied it, provided that nothing of that step
    was refused. Until then another request with the same prefix takes a copy of its own.

    Invariant: a prefix is in the GPU pool's books only if its tokens are all computed or copied there.
    """

    def __init__(
        self,
        gpu: BlockPool,
        needs: BlockNeeds,
        find: Callable[[RequestId], RequestState | None],
        block_tokens: int,
    ) -> None:
        self._gpu = gpu
        self._needs = needs
        self._find = find
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
            if state.shared and is_on_gpu and is_complete and self._find(state.id) is state:
                self._gpu.publish(state.id, state.shared)
        self._filled.clear()
        self._providers.clear()
