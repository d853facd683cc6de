"""Prefetches in pieces: an activation that comes by the copy engine waits for one piece, and the prefetches hardly."""

import random
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipemax.domain.units import GpuBlockId, HostBlockId
from pipemax.transfer.commands import BlockPrefetch, StepCopies
from pipemax.transfer.cuda.copy_runs import CopyRuns, copy_runs
from pipemax.transfer.cuda.device import Lane, Pool
from pipemax.transfer.cuda.pieces import PIECE_S, cut, measure_bytes_per_s
from pipemax.transfer.cuda.transfers import CudaTransfers
from tests.fakes.timed_device import Costs, Stream, TimedDevice
from tests.fakes.timed_steps import RanStep, TimedStep, TimedSteps

BLOCK_BYTES = 640 * 1024
ACTIVATION_BYTES = 12 << 20
COSTS = Costs()
PIECE_BYTES = int(PIECE_S * COSTS.bytes_per_s)
ACTIVATION_S = ACTIVATION_BYTES / COSTS.bytes_per_s
PREFETCH_BLOCKS = round(13e-3 * COSTS.bytes_per_s / BLOCK_BYTES)
PREFETCH_S = PREFETCH_BLOCKS * BLOCK_BYTES / COSTS.bytes_per_s


class NeverGivesWay(TimedDevice):
    def give_way(self, lane: Lane) -> None:
        pass


def prefetch(device: TimedDevice, piece_bytes: int | None) -> CudaTransfers:
    """Start prefetches of 13 ms for the next step."""
    transfers = CudaTransfers(device, block_bytes=BLOCK_BYTES, piece_bytes=piece_bytes)
    blocks = range(0, 2 * PREFETCH_BLOCKS, 2)
    copies = StepCopies(
        prefetches=tuple(BlockPrefetch(HostBlockId(block), GpuBlockId(block)) for block in blocks)
    )
    transfers.begin_step(copies)
    transfers.start_prefetches(copies)
    transfers.end_step(copies)
    return transfers


def waited_s(device: TimedDevice, piece_bytes: int | None, at_s: float) -> float:
    """How long an activation waits that comes so long after prefetches have begun."""
    prefetch(device, piece_bytes)
    arrived = device.receive(ACTIVATION_BYTES, after_s=max(0.0, at_s - device.now_s))
    device.host_waits_for(arrived)
    (activation,) = device.ran[Stream.RECEIVE]
    assert activation.begin_s is not None
    assert activation.end_s == pytest.approx(activation.begin_s + ACTIVATION_S)
    return activation.begin_s - activation.submitted_s


MOMENTS = [1e-3 + 0.37e-3 * index for index in range(30)]


@pytest.mark.parametrize("at_s", MOMENTS)
def test_an_activation_waits_for_at_most_one_piece(at_s: float) -> None:
    assert waited_s(TimedDevice(), PIECE_BYTES, at_s) <= PIECE_S


@pytest.mark.parametrize(
    ("device", "piece_bytes"),
    [(TimedDevice(), None), (NeverGivesWay(), PIECE_BYTES)],
    ids=["in one call", "in calls that do not give way"],
)
def test_otherwise_it_waits_for_all_prefetches(device: TimedDevice, piece_bytes: int | None) -> None:
    assert waited_s(device, piece_bytes, 2e-3) > PREFETCH_S - 2e-3


@pytest.mark.parametrize("bytes_per_s", [12e9, 25e9, 55e9])
def test_the_prefetches_lose_less_than_a_twentieth_of_their_rate(bytes_per_s: float) -> None:
    def seconds(is_cut: bool) -> float:
        device = TimedDevice(Costs(bytes_per_s=bytes_per_s))
        prefetch(device, int(PIECE_S * bytes_per_s) if is_cut else None)
        device.synchronize()
        copies = device.ran[Lane.PREFETCH]
        assert len(copies) == pytest.approx(1 + (copies[-1].end_s / PIECE_S if is_cut else 1), rel=0.1)
        return copies[-1].end_s - copies[0].begin_s

    assert seconds(is_cut=False) / seconds(is_cut=True) > 0.95


@pytest.mark.parametrize("steps_ahead", [0, 1, 9])
def test_a_step_that_needs_its_prefetches_early_gets_them_at_once(steps_ahead: int) -> None:
    """Steps of 1 ms that wait for prefetches of 13: those lose only the moments in which they give way."""

    def run(piece_bytes: int | None) -> list[RanStep]:
        step = TimedStep(compute_s=1e-3, prefetches=PREFETCH_BLOCKS)
        run = TimedSteps(block_bytes=BLOCK_BYTES, steps_ahead=steps_ahead, piece_bytes=piece_bytes)
        return run.run([step] * 10)

    whole, pieces = run(None), run(PIECE_BYTES)
    num_pieces = 2 + PREFETCH_S / PIECE_S  # of a step: they are two batches, each with a last piece
    for before, now in pairwise(pieces):
        assert now.compute.begin_s >= max(work.end_s for work in before.prefetches)
    late_s = pieces[-1].compute.end_s - whole[-1].compute.end_s
    assert 0 < late_s <= len(pieces) * num_pieces * (COSTS.give_way_s + COSTS.call_s)


@pytest.mark.parametrize("steps_ahead", [3, 9])
def test_activations_that_come_early_are_not_late_because_of_prefetches(steps_ahead: int) -> None:
    """Stages whose steps differ in length; the host is ahead, so that no pace of its own could have been right."""
    rng = random.Random(0)
    before_s = [rng.uniform(20e-3, 60e-3) for _ in range(25)]

    def run(prefetches: int, piece_bytes: int | None) -> list[RanStep]:
        steps = [
            TimedStep(
                compute_s=40e-3,
                prefetches=prefetches,
                stores=16,
                received_bytes=ACTIVATION_BYTES,
                before_s=seconds,
            )
            for seconds in before_s
        ]
        run = TimedSteps(block_bytes=BLOCK_BYTES, steps_ahead=steps_ahead, piece_bytes=piece_bytes)
        return run.run(steps)

    num_prefetches = int(0.9 * 40e-3 * COSTS.bytes_per_s / BLOCK_BYTES)
    without, in_one_call = run(0, None), run(num_prefetches, None)
    in_pieces = run(num_prefetches, PIECE_BYTES)

    def most_waited_s(ran: list[RanStep]) -> float:
        return max(step.received.begin_s - step.received.submitted_s for step in ran if step.received)

    assert most_waited_s(in_one_call) > 5e-3
    assert most_waited_s(in_pieces) <= PIECE_S
    assert in_one_call[-1].compute.end_s > 1.02 * without[-1].compute.end_s
    assert in_pieces[-1].compute.end_s < 1.01 * without[-1].compute.end_s


def test_a_wave_gives_way_too() -> None:
    steps = [
        TimedStep(compute_s=40e-3, wave=2000, received_bytes=ACTIVATION_BYTES, before_s=seconds)
        for seconds in (15e-3, 25e-3, 35e-3, 45e-3) * 2
    ]

    def most_waited_s(piece_bytes: int | None) -> float:
        run = TimedSteps(block_bytes=BLOCK_BYTES, steps_ahead=3, num_groups=4, piece_bytes=piece_bytes)
        return max(ran.received.begin_s - ran.received.submitted_s for ran in run.run(steps) if ran.received)

    assert most_waited_s(None) > 2 * PIECE_S
    assert most_waited_s(PIECE_BYTES) <= PIECE_S


# How copies are cut.


@given(
    blocks=st.lists(st.integers(0, 60), min_size=1, unique=True),
    shift=st.integers(0, 5),
    max_bytes=st.integers(1, 40),
)
def test_pieces_copy_each_byte_once_in_as_few_batches_as_their_order_allows(
    blocks: list[int], shift: int, max_bytes: int
) -> None:
    runs = copy_runs([(block, block + shift) for block in blocks], lane=Lane.PREFETCH, block_bytes=8)
    pieces = list(cut(runs, max_bytes))

    def copied(batches: list[CopyRuns]) -> list[tuple[int, int]]:
        return [
            (copy.source.first_byte + byte, copy.target.first_byte + byte)
            for batch in batches
            for copy in batch
            for byte in range(copy.source.num_bytes)
        ]

    assert copied(pieces) == copied([runs])
    assert all(piece.source is Pool.HOST and piece.target is Pool.GPU for piece in pieces)
    assert all(0 < piece.sizes.sum() <= max_bytes for piece in pieces)
    assert all(before.sizes.sum() + now.sizes[0] > max_bytes for before, now in pairwise(pieces))


def test_no_copies_make_no_pieces() -> None:
    empty = np.empty(0, dtype=np.int64)
    runs = CopyRuns(source=Pool.HOST, target=Pool.GPU, source_bytes=empty, target_bytes=empty, sizes=empty)
    assert list(cut(runs, 8)) == []


def test_the_link_s_rate_is_measured() -> None:
    device = TimedDevice(Costs(bytes_per_s=12.5e9))
    assert measure_bytes_per_s(device, 64 << 20) == pytest.approx(12.5e9, rel=0.01)
