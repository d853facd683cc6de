"""Any sequence of takes, resizes, publications and releases keeps the count, and a failed one changes nothing."""

import hypothesis.strategies as st
from hypothesis import given, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from pipemax.control.state.batches import partition_balanced
from pipemax.control.state.pools import BlockPool
from pipemax.control.state.request import SharedBlocks
from pipemax.domain.errors import PoolExhaustedError
from pipemax.domain.request import PrefixId
from pipemax.domain.units import RequestId
from tests.unit.control.tables import park_lengths, roomy_table

REQUESTS = st.sampled_from([RequestId(name) for name in "abcdef"])
PREFIXES = st.sampled_from([None, SharedBlocks(PrefixId("p"), 3), SharedBlocks(PrefixId("q"), 1)])
BLOCKS = st.integers(0, 9)


class PoolMachine(RuleBasedStateMachine):
    """Next to the pool, a model of who holds which named blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool("GPU", 20)
        self.own: dict[RequestId, int] = {}
        self.shared: dict[RequestId, SharedBlocks] = {}

    def used(self) -> int:
        prefixes = {shared.prefix_id: shared.num_blocks for shared in self.shared.values()}
        return sum(self.own.values()) + sum(prefixes.values())

    @rule(request=REQUESTS, blocks=BLOCKS, shared=PREFIXES)
    def take(self, request: RequestId, blocks: int, shared: SharedBlocks | None) -> None:
        if request in self.own:
            return
        free = self.pool.num_free
        cost = self.pool.cost(blocks, shared)
        try:
            self.pool.take(request, blocks, shared)
        except PoolExhaustedError:
            assert cost > free
            assert self.pool.num_free == free
            return
        assert self.pool.num_free == free - cost
        self.own[request] = blocks
        if shared:
            self.shared[request] = shared

    @rule(request=REQUESTS, blocks=BLOCKS)
    def resize(self, request: RequestId, blocks: int) -> None:
        if request not in self.own:
            return
        try:
            self.pool.resize(request, blocks)
        except PoolExhaustedError:
            assert blocks - self.own[request] > self.pool.num_free
            return
        self.own[request] = blocks

    @rule(request=REQUESTS)
    def publish(self, request: RequestId) -> None:
        prefix = SharedBlocks(PrefixId("p"), 3)
        if self.own.get(request, 0) < 3 or request in self.shared:
            return
        known = self.pool.holds_prefix(prefix.prefix_id)
        self.pool.publish(request, prefix)
        if not known:
            self.own[request] -= 3
            self.shared[request] = prefix

    @rule(request=REQUESTS)
    def release(self, request: RequestId) -> None:
        if request not in self.own:
            return
        free = self.pool.num_free
        freed = self.pool.release(request)
        del self.own[request]
        self.shared.pop(request, None)
        assert self.pool.num_free == free + freed

    @invariant()
    def counts_agree(self) -> None:
        assert self.pool.num_used == self.used() <= 20
        self.pool.check_integrity()


PoolMachine.TestCase.settings = settings(stateful_step_count=40)
TestPool = PoolMachine.TestCase


@given(
    lengths=st.lists(st.integers(1, 3000), max_size=60),
    num_batches=st.integers(1, 9),
)
def test_any_partition_is_whole_equal_and_balanced(lengths: list[int], num_batches: int) -> None:
    states = park_lengths(roomy_table(), lengths)
    batches = partition_balanced(states, num_batches)
    assert len(batches) == num_batches
    assert sorted(state.id for batch in batches for state in batch) == sorted(state.id for state in states)
    counts = [len(batch) for batch in batches]
    kv_tokens = [sum(state.computed_tokens for state in batch) for batch in batches]
    assert max(counts) - min(counts) <= 1
    assert max(kv_tokens) - min(kv_tokens) <= max(lengths, default=0)
