"""Waves on a device whose work takes time: copies follow a step's groups of layers, and the next step follows them."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipemax.domain.units import GpuBlockId, HostBlockId
from pipemax.transfer.commands import BlockPrefetch, StepCopies
from pipemax.transfer.cuda.device import Fence
from pipemax.transfer.cuda.transfers import CudaTransfers
from pipemax.transfer.layout import LayerSpan, compact_layout
from tests.fakes.recording_device import RecordingDevice
from tests.fakes.timed_device import Costs
from tests.fakes.timed_steps import RanStep, TimedStep, TimedSteps

GROUPS = 4
SMALL = Costs(bytes_per_s=1e9)
"""A block of a million bytes takes a millisecond, its part in a group a quarter of that."""


def run_small(
    steps: list[TimedStep], steps_ahead: int, *, dropped: Fence | None = None, num_groups: int = GROUPS
) -> list[RanStep]:
    run = TimedSteps(
        block_bytes=1_000_000, steps_ahead=steps_ahead, costs=SMALL, dropped=dropped, num_groups=num_groups
    )
    return run.run(steps)


@given(
    steps=st.lists(
        st.builds(
            TimedStep,
            compute_s=st.floats(4e-3, 4e-2),
            wave=st.integers(0, 20),
            prefetches=st.integers(0, 3),
            stores=st.integers(0, 3),
        ),
        min_size=2,
        max_size=8,
    ),
    steps_ahead=st.integers(1, 9),
)
def test_a_group_s_copies_wait_for_that_group_and_the_next_step_s_group_for_them(
    steps: list[TimedStep], steps_ahead: int
) -> None:
    """For no more than that either: the lane and the computation are idle only where they must be."""
    before: RanStep | None = None
    lane_s = computed_s = 0.0
    for now in run_small(steps, steps_ahead):
        needed_s = max([work.end_s for work in before.prefetches], default=0.0) if before else 0.0
        for group, kernel in enumerate(now.groups):
            copied_s = before.waves[group].end_s if before and before.waves else 0.0
            assert kernel.begin_s == pytest.approx(max(computed_s, needed_s, copied_s, kernel.submitted_s))
            computed_s = kernel.end_s
        stored_s = max([work.end_s for work in before.stores], default=0.0) if before else 0.0
        lane_s = max([lane_s, *(work.end_s for work in now.prefetches)])
        for kernel, wave in zip(now.groups, now.waves, strict=bool(now.waves)):
            assert wave.begin_s == pytest.approx(max(kernel.end_s, lane_s, stored_s, wave.submitted_s))
            lane_s = wave.end_s
        before = now


@pytest.mark.parametrize("num_groups", [2, 4, 8])
def test_copies_of_nearly_a_step_s_time_are_hidden(num_groups: int) -> None:
    """The last group's begin when the step ends; it takes the next step one group's time to need them."""
    step = TimedStep(compute_s=40e-3, wave=38)
    ran = run_small([step] * 30, 2, num_groups=num_groups)
    steady_s = ran[-1].compute.end_s - ran[4].compute.end_s
    assert steady_s == pytest.approx(25 * 40e-3, rel=0.02)


def test_copies_beyond_a_step_s_time_make_steps_as_long_as_they_are() -> None:
    ran = run_small([TimedStep(compute_s=40e-3, wave=60)] * 30, 2)
    steady_s = ran[-1].compute.end_s - ran[4].compute.end_s
    assert steady_s == pytest.approx(25 * 60e-3, rel=0.02)


def test_in_one_group_nothing_is_hidden() -> None:
    """Which is why the controller refuses it."""
    ran = run_small([TimedStep(compute_s=40e-3, wave=38)] * 30, 2, num_groups=1)
    steady_s = ran[-1].compute.end_s - ran[4].compute.end_s
    assert steady_s == pytest.approx(25 * 78e-3, rel=0.02)


def test_the_reported_time_of_a_wave_is_that_of_its_copies() -> None:
    run = TimedSteps(block_bytes=1_000_000, steps_ahead=2, costs=SMALL, num_groups=GROUPS)
    run.run([TimedStep(compute_s=40e-3, wave=10)] * 20)
    assert len(run.prefetch_timings) >= 10
    for timing in run.prefetch_timings:
        assert timing.num_blocks == 10
        assert timing.seconds == pytest.approx(10e-3)


def test_the_stall_is_what_groups_waited_for_a_wave() -> None:
    run = TimedSteps(block_bytes=1_000_000, steps_ahead=9, costs=SMALL, num_groups=GROUPS)
    ran = run.run([TimedStep(compute_s=40e-3, wave=60)] * 20)
    # When the host begins the last step, the device has computed ten.
    kernels = [kernel for step in ran[:10] for kernel in step.groups]
    waited_s = sum(now.begin_s - before.end_s for before, now in pairwise(kernels))
    assert run.stall_s == pytest.approx(waited_s, rel=0.1)
    assert run.stall_s > 0.1


@pytest.mark.parametrize("steps_ahead", [1, 9])
@pytest.mark.parametrize("fence", [Fence.GROUP_AFTER_WAVE, Fence.WAVE_AFTER_GROUP])
def test_without_a_fence_copies_or_groups_run_too_early(fence: Fence, steps_ahead: int) -> None:
    def missed(dropped: Fence | None) -> set[Fence]:
        early = set()
        for step in (TimedStep(compute_s=40e-3, wave=4), TimedStep(compute_s=40e-3, wave=60)):
            ran = run_small([step] * 4, steps_ahead, dropped=dropped)
            for before, now in pairwise(ran):
                for group in range(GROUPS):
                    if now.waves[group].begin_s < now.groups[group].end_s:
                        early.add(Fence.WAVE_AFTER_GROUP)
                    if now.groups[group].begin_s < before.waves[group].end_s:
                        early.add(Fence.GROUP_AFTER_WAVE)
        return early

    assert missed(None) == set()
    assert fence in missed(fence)


# Which bytes.

LAYOUT = compact_layout(num_layers=5, num_kv_heads=1, block_tokens=2, content_bytes=4)  # 8 bytes a layer
WAVE = StepCopies(wave_prefetches=(BlockPrefetch(HostBlockId(1), GpuBlockId(3)),), in_groups=True)


def test_layers_are_divided_nearly_evenly_and_all_of_them() -> None:
    assert LAYOUT.group_spans(2) == (LayerSpan(0, 16), LayerSpan(16, 24))
    assert LAYOUT.group_spans(5) == tuple(LayerSpan(8 * layer, 8) for layer in range(5))
    with pytest.raises(ValueError, match="5 layers cannot make 6 groups"):
        LAYOUT.group_spans(6)


def test_each_group_copies_its_layers_of_a_block_and_no_other_byte() -> None:
    device = RecordingDevice(gpu_blocks=8, host_blocks=8, block_bytes=LAYOUT.block_bytes)
    transfers = CudaTransfers(device, block_bytes=LAYOUT.block_bytes, groups=LAYOUT.group_spans(2))
    gpu, host = (memory.reshape(8, -1) for memory in device.memory.values())
    host[:], gpu[:] = 7, 0xFF
    transfers.begin_step(WAVE)
    transfers.start_prefetches(WAVE)
    for group, copied in enumerate((16, 40)):
        assert (gpu == 7).sum() == (0, 16)[group]
        transfers.begin_group(group)
        transfers.end_group(WAVE, group)
        assert (gpu[3, :copied] == 7).all()
        assert (gpu == 7).sum() == copied
    transfers.end_step(WAVE)
    assert transfers.counts.loaded_bytes == LAYOUT.block_bytes


def test_a_step_that_does_not_tell_its_groups_or_leaves_one_out_is_caught() -> None:
    device = RecordingDevice(gpu_blocks=8, host_blocks=8, block_bytes=LAYOUT.block_bytes)
    transfers = CudaTransfers(device, block_bytes=LAYOUT.block_bytes, groups=LAYOUT.group_spans(2))
    transfers.begin_step(WAVE)
    with pytest.raises(AssertionError):
        transfers.begin_group(1)
    transfers.begin_group(0)
    transfers.end_group(WAVE, 0)
    with pytest.raises(AssertionError, match="ends in group 1"):
        transfers.end_step(WAVE)
