"""Block copies become as few contiguous copies as they can, and each block is copied once."""

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from pipemax.transfer.cuda.copy_runs import copy_runs
from pipemax.transfer.cuda.device import Lane, Pool

BLOCK_BYTES = 8


@given(
    pairs=st.lists(
        st.tuples(st.integers(0, 60), st.integers(0, 60)),
        min_size=1,
        unique_by=(lambda p: p[0], lambda p: p[1]),
    ),
    lane=st.sampled_from([Lane.PREFETCH, Lane.STORE]),
)
def test_each_block_is_copied_once(pairs: list[tuple[int, int]], lane: Lane) -> None:
    copied = [
        ((copy.source.first_byte + byte) // BLOCK_BYTES, (copy.target.first_byte + byte) // BLOCK_BYTES)
        for copy in copy_runs(pairs, lane=lane, block_bytes=BLOCK_BYTES)
        for byte in range(0, copy.source.num_bytes, BLOCK_BYTES)
    ]
    assert sorted(copied) == sorted(pairs)


@given(start=st.tuples(st.integers(0, 9), st.integers(0, 9)), num_blocks=st.integers(1, 20), rng=st.randoms())
def test_adjacent_blocks_become_one_copy(start: tuple[int, int], num_blocks: int, rng: Random) -> None:
    pairs = [(start[0] + block, start[1] + block) for block in range(num_blocks)]
    rng.shuffle(pairs)
    (copy,) = copy_runs(pairs, lane=Lane.STORE, block_bytes=BLOCK_BYTES)
    size = num_blocks * BLOCK_BYTES
    assert copy.source == (Pool.GPU, start[0] * BLOCK_BYTES, size)
    assert copy.target == (Pool.HOST, start[1] * BLOCK_BYTES, size)
