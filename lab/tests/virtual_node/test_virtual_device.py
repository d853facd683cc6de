"""A stage's lanes: what runs after what, and how long copies take."""

from dataclasses import replace

import pytest

from lab.virtual_node.virtual_device import VirtualDevice, VirtualEvent
from pipemax.domain.errors import TransferError
from pipemax.presets import load_node
from pipemax.sim.event_queue import EventQueue
from pipemax.sim.links import Links
from pipemax.transfer.cuda.copy_runs import copy_runs
from pipemax.transfer.cuda.device import Fence, Lane

BLOCK_BYTES = 1 << 20
NODE = load_node("rtx5090x8")
LINK = replace(NODE.link, per_copy_s=0.0, duplex_bytes_per_s=2 * NODE.link.host_to_gpu_bytes_per_s)
BLOCK_S = BLOCK_BYTES / LINK.host_to_gpu_bytes_per_s


def make_device(gpus: range = range(1)) -> tuple[EventQueue, VirtualDevice]:
    queue = EventQueue()
    return queue, VirtualDevice(
        queue, Links(queue, replace(NODE, link=LINK)), gpus=gpus, block_bytes=BLOCK_BYTES
    )


def prefetch(device: VirtualDevice, num_blocks: int) -> None:
    pairs = [(2 * block, 2 * block) for block in range(num_blocks)]
    device.copy(Lane.PREFETCH, copy_runs(pairs, lane=Lane.PREFETCH, block_bytes=BLOCK_BYTES))


def test_a_lane_runs_in_order_and_lanes_run_in_parallel() -> None:
    queue, device = make_device()
    device.compute(1.0, None)
    first = device.record(Lane.COMPUTE)
    device.compute(2.0, None)
    second = device.record(Lane.COMPUTE)
    prefetch(device, 10)
    copied = device.record(Lane.PREFETCH)
    queue.run()
    assert (first.done_s, second.done_s) == (1.0, 3.0)
    assert copied.done_s == pytest.approx(10 * BLOCK_S)


def test_a_lane_waits_for_another_lanes_event() -> None:
    queue, device = make_device()
    prefetch(device, 10)
    device.wait(Lane.COMPUTE, device.record(Lane.PREFETCH), Fence.COMPUTE_AFTER_PREFETCH)
    device.compute(1.0, None)
    computed = device.record(Lane.COMPUTE)
    queue.run()
    assert computed.done_s == pytest.approx(1.0 + 10 * BLOCK_S)


def test_an_event_that_has_happened_holds_nothing_up() -> None:
    queue, device = make_device()
    event = device.record(Lane.COMPUTE)
    assert device.is_done(event)
    device.wait(Lane.STORE, event, Fence.STORE_AFTER_COMPUTE)
    assert device.is_done(device.record(Lane.STORE))
    queue.run()


def test_every_gpu_of_a_stage_copies_its_part() -> None:
    queue, device = make_device(range(2))
    prefetch(device, 10)
    copied = device.record(Lane.PREFETCH)
    queue.run()
    assert copied.done_s == pytest.approx(10 * BLOCK_S)  # over two links at once


def test_synchronize_lets_copies_end_but_not_more() -> None:
    _, device = make_device()
    prefetch(device, 10)
    copied = device.record(Lane.PREFETCH)
    device.compute(1.0, None)
    computed = device.record(Lane.COMPUTE)
    device.synchronize()
    assert device.is_done(copied)
    assert not device.is_done(computed)


def test_synchronize_fails_where_a_copy_never_begins() -> None:
    _, device = make_device()
    device.wait(Lane.STORE, VirtualEvent(), Fence.STORE_AFTER_COMPUTE)
    with pytest.raises(TransferError, match="never happens"):
        device.synchronize()


def test_thousands_of_marks_in_a_row_are_passed() -> None:
    queue, device = make_device()
    device.compute(1.0, None)
    events = [device.record(Lane.COMPUTE) for _ in range(5_000)]
    queue.run()
    assert {event.done_s for event in events} == {1.0}
