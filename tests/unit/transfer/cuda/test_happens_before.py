"""No two conflicting accesses to KV are unordered, whatever the schedule; and no fence is there for nothing."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipemax.domain.units import GpuBlockId, HostBlockId
from pipemax.transfer.commands import BlockPrefetch, BlockStore, StepCopies
from pipemax.transfer.cuda.device import Fence, Lane, Pool, Span
from pipemax.transfer.cuda.transfers import CudaTransfers
from tests.fakes.kv_schedule import Step
from tests.fakes.kv_stage import TINY, RecordedStage
from tests.fakes.recording_device import FakeKernel, RecordingDevice

NUM_STEPS = 40
PIECES = (TINY.block_bytes // 2, 3 * TINY.block_bytes)
"""Parts of a block, and a few blocks."""

WAVE_FENCES = {Fence.GROUP_AFTER_WAVE, Fence.WAVE_AFTER_GROUP}


@given(
    seed=st.integers(0, 2**32 - 1),
    writes_through=st.booleans(),
    has_waves=st.booleans(),
    piece_bytes=st.sampled_from([None, *PIECES]),
)
def test_all_conflicting_accesses_are_ordered(
    seed: int, writes_through: bool, has_waves: bool, piece_bytes: int | None
) -> None:
    stage = RecordedStage(seed, writes_through=writes_through, has_waves=has_waves, piece_bytes=piece_bytes)
    stage.run(NUM_STEPS)
    assert stage.device.races == []
    assert stage.num_wrong == 0


@pytest.mark.parametrize(
    ("fence", "has_waves", "piece_bytes"),
    [(fence, False, None) for fence in Fence if fence not in WAVE_FENCES]
    + [(fence, True, piece_bytes) for fence in Fence for piece_bytes in (None, PIECES[0])],
)
def test_leaving_out_any_one_fence_leaves_a_race(
    fence: Fence, has_waves: bool, piece_bytes: int | None
) -> None:
    def has_race(seed: int) -> bool:
        stage = RecordedStage(seed, dropped=fence, has_waves=has_waves, piece_bytes=piece_bytes)
        stage.run(NUM_STEPS)
        return bool(stage.device.races)

    assert any(has_race(seed) for seed in range(100)), f"without {fence.name} nothing goes wrong"


@pytest.mark.parametrize("writes_through", [False, True])
@pytest.mark.parametrize("has_waves", [False, True])
def test_the_schedules_hold_what_is_dangerous(writes_through: bool, has_waves: bool) -> None:
    stage = RecordedStage(1, writes_through=writes_through, has_waves=has_waves)
    stage.run(300)
    assert stage.schedule.num_evicted > 50
    assert stage.schedule.num_prefetched > 50
    assert stage.schedule.num_aborted_prefetching > 5
    assert stage.schedule.num_prefetched_in_parts > 20
    assert stage.schedule.num_abandoned > 10
    assert (stage.schedule.num_overwritten > 50) is (stage.schedule.num_prefetched_by_waves > 20) is has_waves
    never = {Fence.SAVE_AFTER_COMPUTE} if writes_through else set()  # nothing is left to save
    never |= set() if has_waves else WAVE_FENCES
    assert {fence for _, fence in stage.device.waits} == set(Fence) - never


def test_a_scheduler_that_forgets_the_store_fence_is_caught() -> None:
    assert any(_has_race(seed, store_fence=None) for seed in range(100))


def test_a_scheduler_that_forgets_the_prefetch_fence_is_caught() -> None:
    assert any(_has_race(seed, prefetch_fence=None) for seed in range(100))


def test_a_scheduler_that_forgets_what_it_abandoned_is_caught() -> None:
    assert any(_has_race(seed, abandons_prefetches=False) for seed in range(100))


def _has_race(seed: int, **forgotten: Any) -> bool:
    """Where every step's copies say this instead of what they should."""
    stage = RecordedStage(seed)
    for _ in range(NUM_STEPS):
        step = stage.schedule.next_step()
        stage.run_step(Step(replace(step.copies, **forgotten), step.runs))
    return bool(stage.device.races)


@pytest.mark.parametrize("is_first", [True, False], ids=["before the step begins", "after"])
@pytest.mark.parametrize(
    "earlier",
    [
        StepCopies(prefetches=(BlockPrefetch(HostBlockId(0), GpuBlockId(3)),)),
        StepCopies(stores=(BlockStore(GpuBlockId(4), HostBlockId(0)),)),
    ],
    ids=["source being prefetched", "target being stored"],
)
def test_a_block_may_be_copied_on_write_only_after_the_step_has_begun(
    earlier: StepCopies, is_first: bool
) -> None:
    """vLLM's V2 runner would do it before, and zero blocks: the scheduler refuses models for which it does."""
    device = RecordingDevice(gpu_blocks=8, host_blocks=8, block_bytes=TINY.block_bytes)
    transfers = CudaTransfers(device, block_bytes=TINY.block_bytes)
    transfers.begin_step(earlier)
    transfers.start_prefetches(earlier)
    transfers.end_step(earlier)
    size = TINY.block_bytes
    shared, private = Span(Pool.GPU, 3 * size, size), Span(Pool.GPU, 4 * size, size)
    copy_on_write = FakeKernel([shared], [private], lambda: None)
    if is_first:
        device.launch(Lane.COMPUTE, copy_on_write)
    transfers.begin_step(StepCopies(store_fence=1))
    if not is_first:
        device.launch(Lane.COMPUTE, copy_on_write)
    assert bool(device.races) is is_first
