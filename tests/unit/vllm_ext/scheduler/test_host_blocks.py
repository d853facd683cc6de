"""Host blocks: tables grow by full blocks, equal contents share a block, nothing leaks."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipemax.domain.errors import PoolExhaustedError
from pipemax.domain.units import GpuBlockId
from pipemax.vllm_ext.scheduler.host_blocks import HostBlocks, Replicated

SIZE = 4


def pool(num_blocks: int = 10, *, stores_tokens: bool = False) -> HostBlocks:
    return HostBlocks(num_blocks=num_blocks, block_tokens=SIZE, stores_tokens=stores_tokens)


def hashes(text: str) -> list[bytes]:
    """Of each full block: everything up to its end."""
    return [text[: (index + 1) * SIZE].encode() for index in range(len(text) // SIZE)]


def test_blocks_are_stored_when_they_are_full() -> None:
    host = pool()
    assert host.extend("a", 6, hashes("abcdef")) == [Replicated(0, host.blocks("a")[0], 0, SIZE)]
    assert len(host.blocks("a")) == 2
    assert host.extend("a", 7, hashes("abcdefg")) == []
    assert host.extend("a", 9, hashes("abcdefghi")) == [Replicated(1, host.blocks("a")[1], 0, SIZE)]
    assert host.num_free == 7
    host.check_integrity()


def test_the_last_block_is_saved_once_for_each_time_it_grew() -> None:
    host = pool()
    host.extend("a", 5, [])
    assert host.save_last("a") == (Replicated(1, host.blocks("a")[1], 0, SIZE),)
    assert not host.save_last("a")
    host.extend("a", 6, [])
    assert host.save_last("a") == (Replicated(1, host.blocks("a")[1], 0, SIZE),)
    host.extend("a", 8, [])
    assert not host.save_last("a")


def test_single_tokens_are_stored_once_each_and_leave_nothing_to_save() -> None:
    host = pool(stores_tokens=True)
    assert host.extend("a", 6, hashes("abcdef")) == [
        Replicated(0, host.blocks("a")[0], 0, SIZE),
        Replicated(1, host.blocks("a")[1], 0, 2),
    ]
    assert not host.save_last("a")
    assert host.extend("a", 7, hashes("abcdefg")) == [Replicated(1, host.blocks("a")[1], 2, 1)]
    assert host.extend("a", 9, hashes("abcdefghi")) == [
        Replicated(1, host.blocks("a")[1], 3, 1),
        Replicated(2, host.blocks("a")[2], 0, 1),
    ]
    assert host.extend("b", 6, hashes("abcdxx")) == [Replicated(1, host.blocks("b")[1], 0, 2)]


def test_leading_blocks_that_others_share_are_counted() -> None:
    host = pool()
    host.extend("a", 12, hashes("abcdefghijkl"))
    assert host.num_shared("a") == 0
    host.extend("b", 12, hashes("abcdefghxxxx"))
    assert (host.num_shared("a"), host.num_shared("b")) == (2, 2)
    host.release("b")
    assert host.num_shared("a") == 0
    with pytest.raises(KeyError):
        host.num_shared("b")


@given(
    st.lists(st.lists(st.integers(0, SIZE + 1), min_size=3, max_size=3), min_size=1, max_size=12),
    st.booleans(),
)
def test_growth_within_the_last_block_is_as_in_general(steps: list[list[int]], stores_tokens: bool) -> None:
    general, fast = pool(90, stores_tokens=stores_tokens), pool(90, stores_tokens=stores_tokens)
    tokens = dict.fromkeys("abc", 0)
    for grown in steps:
        step = {name: number for name, number in zip("abc", grown, strict=True) if number}
        before = tokens.copy()
        tokens |= {name: tokens[name] + number for name, number in step.items()}
        stored = {name: general.extend(name, tokens[name], []) for name in step}
        stores, is_grown = fast.extend_within(step)
        within = [name for name, is_in in zip(step, is_grown.tolist(), strict=True) if is_in]
        assert within == [name for name in step if step[name] == 1 and 0 < before[name] % SIZE < SIZE - 1], (
            "one token, which neither begins nor fills a block"
        )
        expected = [[900 + fast.blocks(name)[-1], *stored[name][0][1:4]] for name in within if stores_tokens]
        assert stores.tolist() == expected
        for name in step:
            if name not in within:
                assert fast.extend(name, tokens[name], []) == stored[name]
                fast.note_gpu_end(name, GpuBlockId(900 + fast.blocks(name)[-1]))
            assert fast.num_tokens(name) == general.num_tokens(name)
            assert fast.blocks(name) == general.blocks(name)
            assert fast.save_last(name) == general.save_last(name)
        fast.check_integrity()


def test_a_request_finds_nothing_of_one_that_had_its_place_in_the_arrays() -> None:
    host = pool(stores_tokens=True)
    host.extend("a", 6, [])
    host.release("a")
    host.extend("b", 1, [])
    assert host.num_tokens("b") == 1
    _, is_grown = host.extend_within({"a": 1, "b": 1})
    assert is_grown.tolist() == [False, True]
    assert host.num_tokens("b") == 2


def test_equal_prefixes_share_their_blocks_until_the_last_holder_goes() -> None:
    host = pool()
    host.extend("a", 12, hashes("templateAAAA"))
    assert [store.block_index for store in host.extend("b", 12, hashes("templateBBBB"))] == [2]
    assert host.blocks("a")[:2] == host.blocks("b")[:2]
    assert host.num_free == 6
    host.release("a")
    assert host.num_free == 7
    assert host.extend("c", 8, hashes("template")) == []
    host.check_integrity()
    host.release("b")
    host.release("c")
    host.release("unknown")
    assert host.num_free == 10
    assert host.extend("d", 8, hashes("template")) != [], "nobody holds it any more"
    host.check_integrity()


def test_equal_host_blocks_are_merged() -> None:
    host = pool()
    host.extend("a", 3, [])
    host.extend("b", 3, [])
    assert len(host.extend("a", 4, hashes("same"))) == 1
    assert host.extend("b", 5, hashes("same")) == []
    assert host.blocks("a")[0] == host.blocks("b")[0]
    assert host.num_free == 8
    host.release("a")
    host.check_integrity()


def test_a_pool_without_free_blocks_says_so() -> None:
    host = pool(2)
    host.extend("a", 4, [])
    with pytest.raises(PoolExhaustedError, match="all 2 host blocks are in use"):
        host.extend("b", 5, [])


@given(seed=st.integers(0, 2**32), num_templates=st.integers(1, 3))
def test_references_and_free_blocks_always_add_up(seed: int, num_templates: int) -> None:
    rng, host, texts = Random(seed), pool(200), dict[str, str]()
    for step in range(120):
        match rng.randrange(4):
            case 0:
                template = "xyz"[rng.randrange(num_templates)] * rng.choice([3, 8, 13])
                texts[str(step)] = template + str(step)
                host.extend(str(step), len(texts[str(step)]), hashes(texts[str(step)]))
            case 1 if texts:
                name = rng.choice([*texts])
                host.release(name)
                del texts[name]
            case 2 if texts:
                name = rng.choice([*texts])
                texts[name] += "t" * rng.randint(1, 5)
                host.extend(name, len(texts[name]), hashes(texts[name]))
            case 3 if texts:
                host.save_last(rng.choice([*texts]))
        host.check_integrity()
