"""A running set against the plain bookkeeping of each request."""

from hypothesis import given
from hypothesis import strategies as st

from pipemax.domain.kv_groups import WHOLE_KV, KvGroups
from pipemax.domain.units import ceil_div
from pipemax.sim.systems.running_requests import RunningSet

BLOCK = 4


@given(
    arrivals=st.lists(
        st.tuples(st.integers(0, 6), st.integers(1, 30), st.integers(1, 20)), min_size=1, max_size=12
    ),
    shared=st.integers(0, 12),
    preempt_at=st.integers(1, 12),
    window=st.none() | st.integers(1, 14),
    frees=st.booleans(),
)
def test_running_set_agrees_with_counting_every_request(
    arrivals: list[tuple[int, int, int]], shared: int, preempt_at: int, window: int | None, frees: bool
) -> None:
    """How a single request's blocks in windows are counted is compared with vLLM's own manager elsewhere."""
    groups = KvGroups(full=2, window=3, window_tokens=window) if frees and window else WHOLE_KV
    fast = RunningSet(BLOCK, shared, window_tokens=window, groups=groups)
    plain: dict[int, list[int]] = {}  # request → [KV tokens, outputs to come]

    def held(tokens: int) -> int:
        return ceil_div(tokens, BLOCK) if groups is WHOLE_KV else groups.running_blocks(tokens, BLOCK)

    for step in range(60):
        for request, (joins_at, context, outputs) in enumerate(arrivals):
            if joins_at == step:
                fast.join(request, context, outputs)
                plain[request] = [context, outputs]
        if step == preempt_at and plain:
            request = fast.newest
            assert fast.blocks_of(request) == held(plain[request][0])
            assert list(fast.leave(request)) == plain.pop(request)
        assert len(fast) == len(plain)
        assert fast.context_tokens == sum(kv + shared for kv, _ in plain.values())
        attended = None if window is None else sum(min(kv + shared, window) for kv, _ in plain.values())
        assert fast.attended_in_windows == attended
        assert {r: [kv, out] for r, kv, out in fast.members()} == plain
        assert fast.new_blocks() == sum(held(kv + 1) - held(kv) for kv, _ in plain.values())
        for member in plain.values():
            member[0] += 1
            member[1] -= 1
        ended = {request: held(kv) for request, (kv, left) in plain.items() if left == 0}
        assert dict(fast.step()) == ended
        plain = {request: member for request, member in plain.items() if request not in ended}
