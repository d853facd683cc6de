"""Blocks are counted once, all or nothing."""

import pytest

from pipemax.control.state.pools import BlockPool, Ledger
from pipemax.control.state.request import SharedBlocks
from pipemax.domain.errors import PoolExhaustedError
from pipemax.domain.request import PrefixId
from pipemax.domain.units import RequestId

A, B, C = RequestId("a"), RequestId("b"), RequestId("c")
PREFIX = SharedBlocks(PrefixId("instruction"), 4)


def test_a_prefetch_that_does_not_fit_raises_and_changes_nothing() -> None:
    pool = BlockPool("GPU", 10)
    pool.take(A, 6, None)
    with pytest.raises(PoolExhaustedError, match="request b needs 5 blocks, 4 of 10 are free"):
        pool.take(B, 5, None)
    with pytest.raises(PoolExhaustedError):
        pool.resize(A, 11)
    assert (pool.num_free, pool.own_blocks(A), B in pool) == (4, 6, False)
    pool.check_integrity()


def test_a_shared_prefix_is_counted_once_for_as_long_as_anyone_holds_it() -> None:
    pool = BlockPool("host", 20)
    assert pool.cost(3, PREFIX) == 7
    pool.take(A, 3, PREFIX)
    assert pool.cost(2, PREFIX) == 2
    pool.take(B, 2, PREFIX)
    assert pool.num_used == 9
    assert pool.release(A) == 3
    assert pool.release(B) == 6
    assert pool.num_free == 20
    pool.check_integrity()


def test_a_published_prefix_becomes_shareable_and_its_blocks_move() -> None:
    pool = BlockPool("GPU", 20)
    pool.take(A, 7, None)
    pool.publish(A, PREFIX)
    assert (pool.own_blocks(A), pool.num_used) == (3, 7)
    assert pool.prefix_holder(PREFIX.prefix_id) == A
    pool.take(B, 9, None)
    pool.publish(B, PREFIX)  # another copy: it stays B's own
    assert pool.own_blocks(B) == 9
    assert not pool.shares(B)
    pool.check_integrity()


def test_the_owners_lower_count_is_taken_over_and_its_higher_one_is_not() -> None:
    pool = BlockPool("GPU", 20)
    pool.take(A, 5, None)
    pool.observe_free(10)
    assert pool.num_free == 10
    pool.observe_free(18)
    assert pool.num_free == 15
    pool.check_integrity()


def test_reservation_and_live_kv_are_kept_apart() -> None:
    ledger = Ledger(gpu_blocks=10, host_blocks=20)
    ledger.reserve(A, 8, None)
    assert (ledger.host.num_used, ledger.live.num_used) == (8, 0)
    ledger.set_live(A, 5)
    assert (ledger.host.num_used, ledger.live.num_used) == (8, 5)
    ledger.set_live(A, 9)  # beyond what was reserved
    assert (ledger.host.num_used, ledger.live.num_used) == (9, 9)
    ledger.check_integrity()


def test_growth_beyond_the_host_pool_raises_and_changes_nothing() -> None:
    ledger = Ledger(gpu_blocks=10, host_blocks=10)
    ledger.reserve(A, 6, None)
    ledger.reserve(B, 4, None)
    with pytest.raises(PoolExhaustedError):
        ledger.set_live(A, 7)
    assert ledger.live.own_blocks(A) == 0
    ledger.check_integrity()


def test_release_forgets_a_request_everywhere() -> None:
    ledger = Ledger(gpu_blocks=10, host_blocks=10)
    ledger.reserve(A, 6, PREFIX)
    ledger.gpu.take(A, 5, None)
    ledger.release(A)
    assert ledger.gpu.num_free == ledger.host.num_free == ledger.live.num_free == 10
    ledger.release(C)
    ledger.check_integrity()


def test_gpu_blocks_without_a_host_replica_are_reported() -> None:
    ledger = Ledger(gpu_blocks=10, host_blocks=10)
    ledger.gpu.take(A, 5, None)
    with pytest.raises(AssertionError, match="without a place on the host"):
        ledger.check_integrity()
