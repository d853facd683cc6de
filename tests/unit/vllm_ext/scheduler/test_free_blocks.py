"""Free host blocks are handed out as neighbours, each once."""

from random import Random

import pytest

from pipemax.domain.errors import PoolExhaustedError
from pipemax.vllm_ext.scheduler.free_blocks import FreeBlocks


def test_a_sequence_grows_into_the_blocks_behind_it_though_others_begin_meanwhile() -> None:
    free = FreeBlocks(200)
    first = [free.take()]
    others = []
    for _ in range(20):
        others.append(free.take(others[-1] if len(others) % 7 else None))
        first.append(free.take(first[-1]))
    assert first == list(range(first[0], first[0] + 21))


def test_a_sequence_begins_where_most_blocks_are_free() -> None:
    free = FreeBlocks(40)
    blocks = [free.take()]
    while len(free):
        blocks.append(free.take(blocks[-1]))
    for block in (3, 10, 11, 12, 20, 21):
        free.add(block)
    begin = free.take()
    assert [begin, free.take(begin), free.take(begin + 1)] == [10, 11, 12]


def test_each_block_is_handed_out_once_until_none_is_left() -> None:
    free, rng, held = FreeBlocks(50), Random(1), set[int]()
    for _ in range(2000):
        assert len(free) == 50 - len(held)
        if held and (rng.random() < 0.45 or not len(free)):
            block = rng.choice(sorted(held))
            held.remove(block)
            free.add(block)
        else:
            block = free.take(rng.choice(sorted(held)) if held and rng.random() < 0.5 else None)
            assert block not in held
            held.add(block)
        assert all((block in free) == (block not in held) for block in range(50))
    while len(free):
        free.take()
    with pytest.raises(PoolExhaustedError, match="all 50 host blocks are in use"):
        free.take(3)
