"""Steps and copies on one stage: what they must find, and what must not happen meanwhile."""

import numpy as np
import pytest

from lab.virtual_node.kv_order import Operation, StageKv, StepKv, WrongKvError
from pipemax.transfer.cuda.device import Pool

ALICE, BOB = 11, 22
"""Identities of full blocks."""


def ints(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def step(
    reads: list[tuple[int, int, int]] | None = None, writes: list[tuple[int, int, int, int]] | None = None
) -> StepKv:
    """Reads of (block, identity, end), writes of (block, identity, first, end)."""
    read, written = np.array(reads or [], dtype=np.int64), np.array(writes or [], dtype=np.int64)
    blocks, identities, ends = read.reshape(-1, 3).T
    targets, new, firsts, until = written.reshape(-1, 4).T
    return StepKv(
        read_blocks=blocks,
        read_identities=identities,
        read_ends=ends,
        read_requests=["alice" if identity == ALICE else "bob" for identity in identities],
        written_blocks=targets,
        written_identities=new,
        written_firsts=firsts,
        written_ends=until,
    )


def run(operation: Operation) -> None:
    operation.begin()
    operation.end()


@pytest.fixture
def kv() -> StageKv:
    """Alice's KV in GPU block 1, stored in host block 5."""
    stage = StageKv(3, gpu_blocks=8, host_blocks=8, block_tokens=16)
    stage.begin_step()
    run(stage.compute(step(writes=[(1, ALICE, 0, 16)])))
    run(stage.copy(Pool.GPU, ints(1), ints(5)))
    stage.begin_step()
    return stage


def test_a_step_finds_what_came_back_to_another_block(kv: StageKv) -> None:
    run(kv.copy(Pool.HOST, ints(5), ints(2)))
    run(kv.compute(step(reads=[(2, ALICE, 16)])))


def test_a_step_that_begins_before_its_prefetch_has_arrived_is_named(kv: StageKv) -> None:
    prefetch = kv.copy(Pool.HOST, ints(5), ints(2))
    compute = kv.compute(step(reads=[(2, ALICE, 16)]))
    with pytest.raises(
        WrongKvError,
        match="for request alice reads GPU block 2 before a prefetch of step 1 on stage 3 has arrived",
    ):
        compute.begin()
    prefetch.begin()
    with pytest.raises(WrongKvError, match="reads GPU block 2 which is being written"):
        compute.begin()


def test_a_block_that_holds_the_same_kv_by_chance_is_no_excuse(kv: StageKv) -> None:
    prefetch = kv.copy(Pool.HOST, ints(5), ints(1))
    compute = kv.compute(step(reads=[(1, ALICE, 16)]))
    with pytest.raises(WrongKvError, match="has arrived there"):
        compute.begin()
    run(prefetch)
    run(compute)


def test_a_prefetch_that_was_forgotten_is_found_when_the_step_is_submitted(kv: StageKv) -> None:
    with pytest.raises(
        WrongKvError, match="reads GPU block 2 as KV of request alice, which it does not hold"
    ):
        kv.compute(step(reads=[(2, ALICE, 16)]))


def test_a_copy_to_the_wrong_request_is_found(kv: StageKv) -> None:
    run(kv.copy(Pool.HOST, ints(5), ints(2)))
    with pytest.raises(WrongKvError, match="as KV of request bob"):
        kv.compute(step(reads=[(2, BOB, 16)]))


def test_a_block_that_lacks_its_last_slots_is_found(kv: StageKv) -> None:
    run(kv.compute(step(writes=[(2, BOB, 0, 4)])))
    run(kv.compute(step(reads=[(2, BOB, 4)], writes=[(2, BOB, 4, 5)])))
    with pytest.raises(WrongKvError, match="up to slot 5"):
        kv.compute(step(reads=[(2, BOB, 6)]))


def test_a_copy_may_not_overwrite_what_a_step_reads(kv: StageKv) -> None:
    reader = kv.compute(step(reads=[(1, ALICE, 16)]))
    reader.begin()
    prefetch = kv.copy(Pool.HOST, ints(5), ints(1))
    with pytest.raises(
        WrongKvError, match="a prefetch of step 1 on stage 3 writes GPU block 1 which is being read"
    ):
        prefetch.begin()
    reader.end()
    run(prefetch)


def test_a_step_whose_block_was_reused_too_early_is_found(kv: StageKv) -> None:
    reader = kv.compute(step(reads=[(1, ALICE, 16)]))
    kv.begin_step()
    run(kv.compute(step(writes=[(1, BOB, 0, 16)])))
    with pytest.raises(
        WrongKvError, match=r"step 1 .* alice reads GPU block 1 which step 2 on stage 3 has overwritten"
    ):
        reader.begin()


def test_a_store_may_not_begin_before_its_step_has_computed(kv: StageKv) -> None:
    compute = kv.compute(step(writes=[(2, BOB, 0, 16)]))
    store = kv.copy(Pool.GPU, ints(2), ints(6))
    compute.begin()
    with pytest.raises(WrongKvError, match="a store of step 1 on stage 3 reads GPU block 2"):
        store.begin()
    compute.end()
    run(store)


def test_a_step_may_append_to_a_block_whose_other_slots_are_being_stored(kv: StageKv) -> None:
    run(kv.compute(step(writes=[(2, BOB, 0, 4)])))
    store = kv.store_tokens(np.array([(2, 6, 0, 4)], dtype=np.int32))
    append = kv.compute(step(reads=[(2, BOB, 4)], writes=[(2, BOB, 4, 5)]))
    store.begin()
    append.begin()
    store.end()
    append.end()
    run(kv.store_tokens(np.array([(2, 6, 4, 1)], dtype=np.int32)))


def test_slots_that_the_host_lacks_are_found(kv: StageKv) -> None:
    run(kv.compute(step(writes=[(2, BOB, 0, 5)])))
    with pytest.raises(WrongKvError, match=r"needs slots \[0, 4\) of host block 6, which has 0"):
        kv.store_tokens(np.array([(2, 6, 4, 1)], dtype=np.int32))
    with pytest.raises(WrongKvError, match=r"needs slots \[0, 6\) of GPU block 2, which has 5"):
        kv.store_tokens(np.array([(2, 6, 5, 1)], dtype=np.int32))


def test_a_step_may_read_what_it_writes_itself(kv: StageKv) -> None:
    run(kv.compute(step(reads=[(2, BOB, 16)], writes=[(2, BOB, 0, 16), (3, 33, 0, 4)])))


def test_two_writes_of_a_block_keep_their_order(kv: StageKv) -> None:
    first = kv.copy(Pool.HOST, ints(5), ints(2))
    second = kv.compute(step(writes=[(2, BOB, 0, 16)]))
    with pytest.raises(
        WrongKvError, match="writes GPU block 2 before a prefetch of step 1 on stage 3 has written it"
    ):
        second.begin()
    run(first)
    run(second)
