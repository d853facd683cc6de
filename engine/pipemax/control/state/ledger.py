"""The ledger of blocks: how many each request holds on the GPU, holds live, and has reserved on the host.

It keeps counts, never block ids, in three pools of one kind. ``gpu`` counts the blocks that residents hold (only vLLM
knows their ids). ``host`` counts reservations: what a request may grow into without asking. ``live`` counts the KV that
exists, always within the reservations. A shared prefix is counted once per pool, for as long as any request holds it.
On the GPU that is so only once the prefix was published, that is, after the step that computed or copied it; until then
another request can only hold a copy of its own. Every change either happens whole or raises and has changed nothing.
"""

from typing import NamedTuple

from pipemax.domain.errors import PoolExhaustedError
from pipemax.domain.request import PrefixId
from pipemax.domain.units import RequestId


class SharedBlocks(NamedTuple):
    """The whole blocks of a shared prefix."""

    prefix_id: PrefixId
    num_blocks: int


class _Group:
    """A shared prefix within one pool."""

    __slots__ = ("holders", "num_blocks")

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.holders: dict[RequestId, None] = {}


class PoolCounts:
    """Read the count of one pool."""

    def __init__(self, name: str, num_blocks: int) -> None:
        self.name = name
        self.num_blocks = num_blocks
        self._own: dict[RequestId, int] = {}
        self._shared: dict[RequestId, SharedBlocks] = {}
        self._groups: dict[PrefixId, _Group] = {}
        self._used = 0
        self._unaccounted = 0  # blocks in use by the engine's count that ours does not have

    def __contains__(self, request_id: RequestId) -> bool:
        return request_id in self._own

    def __len__(self) -> int:
        return len(self._own)

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
        return self._own[request_id]

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

    def check_integrity(self) -> None:
        """Recount the blocks: free + held + unaccounted = pool. Raise ``AssertionError`` if they differ."""
        holders: dict[PrefixId, set[RequestId]] = {}
        for request_id, shared in self._shared.items():
            holders.setdefault(shared.prefix_id, set()).add(request_id)
        counted = {prefix_id: set(group.holders) for prefix_id, group in self._groups.items()}
        assert holders == counted, (self.name, holders, counted)
        assert all(own >= 0 for own in self._own.values()), (self.name, self._own)
        held = sum(self._own.values()) + sum(group.num_blocks for group in self._groups.values())
        assert held == self._used, (self.name, held, self._used)
        assert self.num_free + self._used + self._unaccounted == self.num_blocks, self.name
        assert self.num_free <= self.num_blocks, (self.name, self.num_free)


class BlockPool(PoolCounts):
    """Change the count of one pool."""

    def take(self, request_id: RequestId, own_blocks: int, shared: SharedBlocks | None) -> None:
        assert request_id not in self._own, (self.name, request_id)
        cost = self.cost(own_blocks, shared)
        self._require(request_id, cost)
        if shared is not None:
            group = self._groups.setdefault(shared.prefix_id, _Group(shared.num_blocks))
            group.holders[request_id] = None
            self._shared[request_id] = shared
        self._own[request_id] = own_blocks
        self._used += cost

    def publish(self, request_id: RequestId, shared: SharedBlocks) -> None:
        """Let others share the prefix among a request's own blocks from now on; no effect if another's is shared."""
        if shared.prefix_id in self._groups or request_id in self._shared:
            return
        self._own[request_id] -= shared.num_blocks
        self._shared[request_id] = shared
        self._groups[shared.prefix_id] = group = _Group(shared.num_blocks)
        group.holders[request_id] = None

    def resize(self, request_id: RequestId, own_blocks: int) -> None:
        """Grow or shrink what a request holds apart from its shared prefix."""
        more = own_blocks - self._own[request_id]
        if more > 0:
            self._require(request_id, more)
        self._own[request_id] = own_blocks
        self._used += more

    def release(self, request_id: RequestId) -> int:
        """Release everything that a request holds; return the number of blocks that became free."""
        freed = self._own.pop(request_id)
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
        self._used += own_blocks - self._own[request_id]
        self._own[request_id] = own_blocks

    def _require(self, request_id: RequestId, num_blocks: int) -> None:
        if num_blocks > self.num_free:
            raise PoolExhaustedError(
                f"{self.name} pool: request {request_id} needs {num_blocks} blocks, {self.num_free} of "
                f"{self.num_blocks} are free"
            )


class Pools(NamedTuple):
    """The three pools, for reading."""

    gpu: PoolCounts
    host: PoolCounts
    live: PoolCounts


class Ledger:
    """The three pools, and the changes that keep them consistent with each other."""

    def __init__(self, *, gpu_blocks: int, host_blocks: int) -> None:
        self.gpu = BlockPool("GPU", gpu_blocks)
        self.host = BlockPool("host", host_blocks)
        self.live = BlockPool("live KV", host_blocks)
        self.pools = Pools(self.gpu, self.host, self.live)

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
        assert self.host._own.keys() == self.live._own.keys(), "reserved and live requests differ"
        for request_id, own in self.live._own.items():
            assert own <= self.host.own_blocks(request_id), (request_id, own)
        for request_id in self.gpu._own:
            assert request_id in self.host, f"{request_id} is on the GPU without a place on the host"
