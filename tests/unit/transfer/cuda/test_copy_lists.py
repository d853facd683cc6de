"""Spans become the addresses that CUDA is given."""

import pytest

from pipemax.transfer.cuda.copy_lists import CopyList, PoolMap
from pipemax.transfer.cuda.copy_runs import copy_runs
from pipemax.transfer.cuda.device import Copy, Lane, Pool, Span

POOLS = PoolMap(
    addresses={Pool.GPU: 10_000, Pool.HOST: 50_000},
    num_bytes={Pool.GPU: 100, Pool.HOST: 200},
    host_piece_bytes=64,
)


def copy(host_byte: int, gpu_byte: int, num_bytes: int) -> Copy:
    return Copy(Span(Pool.HOST, host_byte, num_bytes), Span(Pool.GPU, gpu_byte, num_bytes))


def test_a_copy_within_a_piece_is_one() -> None:
    assert POOLS.resolve([copy(64, 0, 64)]) == CopyList([10_000], [50_064], [64])


def test_a_copy_over_borders_of_registered_memory_is_cut_there() -> None:
    copies = POOLS.resolve([copy(60, 4, 90)])
    assert copies == CopyList([10_004, 10_008, 10_072], [50_060, 50_064, 50_128], [4, 64, 22])


def test_both_directions_are_cut() -> None:
    source, target = copy(60, 4, 8)
    assert POOLS.resolve([Copy(target, source)]) == CopyList([50_060, 50_064], [10_004, 10_008], [4, 4])


def test_memory_registered_at_once_is_not_cut() -> None:
    whole = PoolMap(addresses=POOLS.addresses, num_bytes=POOLS.num_bytes)
    assert whole.resolve([copy(60, 4, 90)]).sizes == [90]


@pytest.mark.parametrize(
    ("host_byte", "gpu_byte", "num_bytes"), [(-1, 0, 4), (197, 0, 4), (0, 97, 4), (0, 0, 0)]
)
def test_a_span_outside_of_its_pool_is_refused(host_byte: int, gpu_byte: int, num_bytes: int) -> None:
    with pytest.raises(ValueError, match="leaves its pool"):
        POOLS.resolve([copy(host_byte, gpu_byte, num_bytes)])


def test_spans_of_different_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="differ in length"):
        POOLS.resolve([Copy(Span(Pool.HOST, 0, 4), Span(Pool.GPU, 0, 5))])


def test_runs_of_blocks_come_out_the_same_by_the_faster_way() -> None:
    pairs = [(0, 3), (1, 4), (9, 0), (12, 7)]
    runs = copy_runs(pairs, lane=Lane.PREFETCH, block_bytes=8)
    assert POOLS.resolve(runs) == POOLS.resolve([*runs])
    assert POOLS.resolve(runs).sizes == [16, 8, 8]


@pytest.mark.parametrize(
    ("pairs", "sizes"), [([(6, 0), (7, 1), (8, 2)], [16, 8]), ([(7, 0), (8, 4)], [8, 8])]
)
def test_runs_over_borders_are_cut_too(pairs: list[tuple[int, int]], sizes: list[int]) -> None:
    runs = copy_runs(pairs, lane=Lane.PREFETCH, block_bytes=8)
    assert POOLS.resolve(runs).sizes == sizes


@pytest.mark.parametrize("pair", [(25, 0), (0, 13), (-1, 0)])
def test_runs_that_leave_a_pool_are_refused_too(pair: tuple[int, int]) -> None:
    runs = copy_runs([pair], lane=Lane.PREFETCH, block_bytes=8)
    with pytest.raises(ValueError, match="leaves its pool"):
        POOLS.resolve(runs)
