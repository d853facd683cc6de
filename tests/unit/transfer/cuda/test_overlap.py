"""Copies overlap with computation that they have nothing to do with, however far the host is ahead of the device."""

import itertools
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipemax.transfer.cuda.device import Fence, Lane
from tests.fakes.timed_device import Costs, Work
from tests.fakes.timed_steps import RanStep, TimedStep, TimedSteps

STEPS_AHEAD = range(10)
WAVE_FENCES = (Fence.GROUP_AFTER_WAVE, Fence.WAVE_AFTER_GROUP)  # in test_waves
BLOCK_BYTES = 640 * 1024
"""Of one of eight stages of a 70B model."""
INPUT_BYTES = 256 * 1024
"""The block tables of 256 requests of 4,000 tokens."""


def hidden_share(*, steps_ahead: int, load_share: float) -> float:
    """The share of the prefetches' time that does not lengthen 30 decode steps of such a stage.

    A step takes its inputs in, computes for 40 ms and sends the activations of 256 requests (8 MiB). Its prefetches
    take ``load_share`` of its time.
    """
    compute_s, num_steps, costs = 0.040, 30, Costs()
    num_blocks = int(load_share * compute_s * costs.bytes_per_s / BLOCK_BYTES)

    def total_s(prefetches: int) -> float:
        run = TimedSteps(block_bytes=BLOCK_BYTES, steps_ahead=steps_ahead, costs=costs)
        step = TimedStep(
            compute_s=compute_s,
            prefetches=prefetches,
            stores=16,
            sent_bytes=8 << 20,
            input_bytes=INPUT_BYTES,
        )
        ran = run.run([step] * num_steps)
        return ran[-1].compute.end_s

    copied_s = (num_steps - 1) * num_blocks * BLOCK_BYTES / costs.bytes_per_s
    return 1 - (total_s(num_blocks) - total_s(0)) / copied_s


@pytest.mark.parametrize("steps_ahead", STEPS_AHEAD)
def test_prefetches_hide_behind_computation(steps_ahead: int) -> None:
    assert hidden_share(steps_ahead=steps_ahead, load_share=0.9) >= 0.95


@pytest.mark.parametrize("steps_ahead", STEPS_AHEAD)
def test_a_step_s_inputs_do_not_wait_for_its_prefetches(steps_ahead: int) -> None:
    """Both take the one copy engine to the GPU."""
    run = TimedSteps(block_bytes=BLOCK_BYTES, steps_ahead=steps_ahead)
    step = TimedStep(compute_s=0.040, prefetches=2000, later_prefetches=500, input_bytes=INPUT_BYTES)
    for before, now in itertools.pairwise(run.run([step] * 20)):
        (inputs,) = now.inputs
        assert inputs.begin_s == pytest.approx(max(before.compute.end_s, inputs.submitted_s))
        assert inputs.end_s == pytest.approx(inputs.begin_s + INPUT_BYTES / Costs().bytes_per_s)
        assert now.compute.begin_s == pytest.approx(max(inputs.end_s, now.compute.submitted_s))


@pytest.mark.parametrize("steps_ahead", [1, 9])
def test_the_reported_prefetch_times_are_those_of_the_link(steps_ahead: int) -> None:
    run = TimedSteps(block_bytes=BLOCK_BYTES, steps_ahead=steps_ahead)
    run.run([TimedStep(compute_s=0.040, prefetches=2000, later_prefetches=500)] * 20)
    link_s = 2500 * BLOCK_BYTES / Costs().bytes_per_s
    assert len(run.prefetch_timings) >= 10
    assert all(timing.num_blocks == 2500 for timing in run.prefetch_timings)
    assert [timing.seconds for timing in run.prefetch_timings] == [pytest.approx(link_s)] * len(
        run.prefetch_timings
    )


def test_a_late_host_s_work_is_no_part_of_a_prefetch_s_time() -> None:
    """Every step's prefetches are submitted to an idle lane, a fifth as fast as the link copies."""
    costs = Costs(copy_s=0.2 * BLOCK_BYTES / Costs().bytes_per_s)
    run = TimedSteps(block_bytes=BLOCK_BYTES, steps_ahead=0, costs=costs)
    run.run([TimedStep(compute_s=0.040, prefetches=1000)] * 10, host_s=0.020)
    assert len(run.prefetch_timings) >= 8
    for timing in run.prefetch_timings:
        assert timing.seconds == pytest.approx(1000 * BLOCK_BYTES / costs.bytes_per_s)


@pytest.mark.parametrize("steps_ahead", [0, 2])
def test_a_late_host_s_work_is_no_stall(steps_ahead: int) -> None:
    """A step without prefetches waits for nothing, however long the host takes to submit its saves."""
    costs = Costs(copy_s=1e-3)
    run = TimedSteps(block_bytes=1_000_000, steps_ahead=steps_ahead, costs=costs)
    run.run([TimedStep(compute_s=1e-3, saves=9)] * 10)
    assert run.stall_s < 1e-4


def test_the_stall_is_what_steps_waited_for_their_prefetches() -> None:
    run = TimedSteps(block_bytes=1_000_000, steps_ahead=9, costs=SMALL)
    ran = run.run([TimedStep(compute_s=5e-3, prefetches=9)] * 40)
    waited_s = sum(now.compute.begin_s - before.compute.end_s for before, now in itertools.pairwise(ran[:29]))
    assert run.stall_s == pytest.approx(waited_s, rel=0.1)
    assert run.stall_s > 0.1


SMALL = Costs(bytes_per_s=1e9)
"""A block of a million bytes takes a millisecond."""
random_step = st.builds(
    TimedStep,
    compute_s=st.floats(1e-4, 2e-2),
    prefetches=st.integers(0, 9),
    later_prefetches=st.integers(0, 9),
    saves=st.integers(0, 2),
    stores=st.integers(0, 6),
    store_fence=st.sampled_from([None, 0, 1, 2]),
    sent_bytes=st.integers(1, 5_000_000),
)
random_steps = st.lists(random_step, min_size=2, max_size=8)


def over_random_steps(test: Callable[..., None]) -> Callable[[], None]:
    """Run the test over random steps, with a host that is 0 to 9 of them ahead."""
    return given(steps=random_steps, steps_ahead=st.sampled_from(STEPS_AHEAD))(test)


def run_small(steps: list[TimedStep], steps_ahead: int, dropped: Fence | None = None) -> list[RanStep]:
    run = TimedSteps(block_bytes=1_000_000, steps_ahead=steps_ahead, costs=SMALL, dropped=dropped)
    return run.run(steps)


def last_end(*works: list[Work]) -> float:
    return max((work.end_s for work in itertools.chain(*works)), default=0.0)


@over_random_steps
def test_the_prefetch_lane_is_not_idle_while_a_prefetch_may_run(
    steps: list[TimedStep], steps_ahead: int
) -> None:
    """It may once it is submitted, what computed and stored before it is done, and so are the prefetches before it."""
    may_run_s = 0.0
    before: RanStep | None = None
    for ran in run_small(steps, steps_ahead):
        if before is not None:
            may_run_s = max(may_run_s, before.compute.end_s, last_end(before.stores))
        may_run_s = max(may_run_s, last_end(ran.saves))
        for work in ran.prefetches + ran.later_prefetches:
            assert work.begin_s == pytest.approx(max(may_run_s, work.submitted_s))
            may_run_s = work.end_s
        before = ran


@over_random_steps
def test_a_step_waits_for_what_it_needs_and_for_nothing_that_a_later_step_needs(
    steps: list[TimedStep], steps_ahead: int
) -> None:
    ran = run_small(steps, steps_ahead)
    may_run_s = 0.0
    for index, (step, now) in enumerate(zip(steps, ran, strict=True)):
        needed = [earlier.prefetches for earlier in ran[:index]]
        needed += [earlier.later_prefetches for earlier in ran[: max(0, index - 1)]]
        if step.store_fence is not None:
            stored = ran[: max(0, index - step.store_fence + 1)]
            needed += [earlier.saves for earlier in stored]
            needed += [earlier.stores for earlier in stored if earlier is not now]
        may_run_s = max(may_run_s, last_end(*needed), now.compute.submitted_s)
        assert now.compute.begin_s == pytest.approx(may_run_s)
        may_run_s = now.compute.end_s


def out_of_order(steps: list[TimedStep], ran: list[RanStep]) -> set[Fence]:
    """The fences whose work ran too early."""
    missed = set()

    def require(fence: Fence, late: list[Work], early: list[Work]) -> None:
        if late and early and min(work.begin_s for work in late) < last_end(early):
            missed.add(fence)

    for index, (step, now) in enumerate(zip(steps, ran, strict=True)):
        require(Fence.STORE_AFTER_COMPUTE, now.stores, [now.compute])
        for earlier in ran[:index]:
            prefetches = now.prefetches + now.later_prefetches
            require(Fence.COMPUTE_AFTER_PREFETCH, [now.compute], earlier.prefetches)
            require(Fence.PREFETCH_AFTER_COMPUTE, prefetches, [earlier.compute])
            require(Fence.PREFETCH_AFTER_STORE, prefetches, earlier.stores + now.saves)
            require(Fence.SAVE_AFTER_COMPUTE, now.saves, [earlier.compute])
        if step.store_fence is not None:
            for earlier in ran[: max(0, index - step.store_fence + 1)]:
                stores = [] if earlier is now else earlier.stores
                require(Fence.COMPUTE_AFTER_STORE, [now.compute], earlier.saves + stores)
    return missed


@over_random_steps
def test_work_runs_in_the_order_of_every_fence(steps: list[TimedStep], steps_ahead: int) -> None:
    assert not out_of_order(steps, run_small(steps, steps_ahead))


@pytest.mark.parametrize("steps_ahead", [1, 9])
@pytest.mark.parametrize("fence", [fence for fence in Fence if fence not in WAVE_FENCES])
def test_without_a_fence_work_runs_too_early(fence: Fence, steps_ahead: int) -> None:
    missed = set()
    for step in (
        TimedStep(compute_s=1e-3, prefetches=2, saves=9, stores=9, store_fence=0),
        TimedStep(compute_s=1e-3, prefetches=2, saves=9, stores=9),
        TimedStep(compute_s=1e-3, prefetches=9),
        TimedStep(compute_s=20e-3, prefetches=2),
        TimedStep(compute_s=20e-3, saves=1),
        TimedStep(compute_s=20e-3, stores=1),
    ):
        steps = [step] * 4
        missed |= out_of_order(steps, run_small(steps, steps_ahead, dropped=fence))
    assert fence in missed


@over_random_steps
def test_a_send_goes_at_once_and_shares_the_way_out_with_stores_only(
    steps: list[TimedStep], steps_ahead: int
) -> None:
    sent_s = 0.0
    run = TimedSteps(block_bytes=1_000_000, steps_ahead=steps_ahead, costs=SMALL)
    for ran, step in zip(run.run(steps), steps, strict=True):
        ready_s = max(sent_s, ran.compute.end_s, ran.send.submitted_s)
        assert ran.send.begin_s == pytest.approx(ready_s)
        own_s = step.sent_bytes / SMALL.bytes_per_s
        sent_s = ran.send.end_s
        assert own_s <= sent_s - ready_s + 1e-9
        assert sent_s - ready_s <= 2 * own_s + 1e-9, "an even share of the way out"
    assert all(work.begin_s is not None for work in run.device.ran[Lane.STORE])
