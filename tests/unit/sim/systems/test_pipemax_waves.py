"""Waves on the simulated machine: larger batches, and copies that are never ahead of what they follow."""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from pipemax.domain.plan import StepPlan
from pipemax.sim.pipeline import Step
from pipemax.sim.result import SimulationResult
from pipemax.sim.systems.pipemax import PipeMaxSystem
from pipemax.sim.systems.pipemax_config import PipeMaxOptions, mixed_batching
from tests.unit.sim.machines import small_node, small_scenario
from tests.unit.sim.systems.test_pipemax import steady_means, uniform_workload

GROUPS = 4


class WatchedSystem(PipeMaxSystem):
    """Notes when parts of steps run and when copies do, and looks at each wave as it is planned."""

    def __init__(self, *arguments: Any) -> None:
        self.computed_s: dict[tuple[int, int, int], float] = {}
        """By stage, step and part."""
        self.started_s: dict[tuple[int, int, int], float] = {}
        self.copied: list[tuple[int, int, int, float, float]] = []
        """Stage, the step that a wave follows, group; begin and end."""
        self.needed: dict[int, int] = {}
        """Of each step that waits for a wave, the step that the wave follows."""
        self._step_of_plan: dict[int, int] = {}
        self.num_waves = 0
        self.free_blocks: list[int] = []
        """After each plan."""
        super().__init__(*arguments)

    def _carry_out(self, plan: StepPlan) -> None:
        if plan.overwrite:
            self.num_waves += 1
            # What a wave overwrites was computed, and stored, by steps that have completed.
            busy = {request for flight in self._flights.values() for request in flight.plan.run}
            assert not busy & set(plan.overwrite)
            self._step_of_plan[plan.step_id] = self._num_submitted
        self.free_blocks.append(plan.decision.free_gpu_blocks)
        number = self._num_submitted
        super()._carry_out(plan)
        if plan.run:
            must_have = self._flights[number].must_have
            if must_have in self._step_of_plan:
                self.needed[number] = self._step_of_plan[must_have]

    def _may_start(self, stage: int, step: Step, part: int) -> bool:
        may = super()._may_start(stage, step, part)
        if may:
            self.started_s[stage, step.number, part] = self._queue.now_s()
        return may

    def _part_computed(self, stage: int, step: Step, part: int) -> None:
        self.computed_s[stage, step.number, part] = self._queue.now_s()
        super()._part_computed(stage, step, part)

    def _copied(self, stage: int, gpu: int, copy: Any) -> None:
        if copy.num_groups > 1:
            followed = (copy.after - 1) // GROUPS
            begin_s = max(copy.queued_s, self._last_copy_s[gpu])
            self.copied.append((stage, followed, copy.group, begin_s, self._queue.now_s()))
        super()._copied(stage, gpu, copy)


@cache
def run(
    num_gpus: int, *, waves: bool = True, mixed: bool = False, bias: float = 0.0, link_share: float = 1.0
) -> WatchedSystem:
    """Simulate a table; ``link_share`` of its bandwidth has the link to each GPU."""
    node = small_node(num_gpus=num_gpus, kv_gb=0.4)
    rate = link_share * node.link.host_to_gpu_bytes_per_s
    node = replace(node, link=replace(node.link, host_to_gpu_bytes_per_s=rate))
    controller = {"wave_groups": GROUPS if waves else None, **(mixed_batching(256) if mixed else {})}
    system = WatchedSystem(
        small_scenario(uniform_workload(200, 300, 100), node),
        PipeMaxOptions(controller=controller, estimator_bias=bias),
    )
    system.result = system.simulate()  # type: ignore[attr-defined]
    return system


def result_of(system: WatchedSystem) -> SimulationResult:
    return system.result  # type: ignore[attr-defined,no-any-return]


@pytest.mark.parametrize("num_stages", [2, 3, 4])
def test_a_batch_gives_up_room_only_once_it_has_run(num_stages: int) -> None:
    """b = M/n + p · (1 − c/n), where c is 2 without waves and at most 1 + 1/G with them."""
    result = result_of(run(num_stages))
    active, prefetched = steady_means(result)
    share = result.gpu_kv_tokens / num_stages
    assert prefetched > 0.1 * share

    def room(c: float) -> float:
        return share + prefetched * (1 - c / num_stages)

    assert room(1 + 1 / GROUPS) * 0.98 <= active <= room(1.0) * 1.02, (active, room(1.25), room(1.0))
    assert active > 1.05 * steady_means(result_of(run(num_stages, waves=False)))[0]


LATE = {"bias": 0.5, "link_share": 0.25}
"""The controller takes steps to be half as long again as they are, and the link bounds what it prefetches."""


@pytest.mark.parametrize(
    "how", [{}, {"mixed": True}, {"num_gpus": 4}, LATE], ids=["phases", "mixed", "four stages", "late copies"]
)
def test_copies_follow_the_computation_and_the_next_step_follows_them(how: dict[str, Any]) -> None:
    system = run(**{"num_gpus": 2, **how})
    assert system.num_waves > 50
    followers = {followed: number for number, followed in system.needed.items()}
    num_followed = 0
    for stage, followed, group, begin_s, end_s in system.copied:
        assert system.computed_s[stage, followed, group] <= begin_s
        if followed in followers:
            num_followed += 1
            assert end_s <= system.started_s[stage, followers[followed], group]
    assert num_followed > 0.9 * len(system.copied) > 0


@pytest.mark.parametrize(("num_stages", "mixed"), [(2, False), (2, True), (4, False)])
def test_a_budget_of_one_step_s_copies_is_hidden(num_stages: int, mixed: bool) -> None:
    result = result_of(run(num_stages, mixed=mixed))
    assert result.h2d_fraction > 0.5
    assert result.stall_fraction < 0.02


def test_a_budget_beyond_it_stalls_and_is_counted() -> None:
    late, right = (result_of(run(2, **how)) for how in (LATE, {**LATE, "bias": 0.0}))
    assert late.stall_fraction > 0.05
    assert right.stall_fraction < 0.02
    assert late.bubble_fraction >= late.stall_fraction


@pytest.mark.parametrize(("num_stages", "mixed"), [(2, False), (2, True), (4, False)])
def test_what_is_planned_always_fits_the_pool(num_stages: int, mixed: bool) -> None:
    system = run(num_stages, mixed=mixed)
    assert 0 <= min(system.free_blocks) < 0.02 * system._machine.capacity.gpu_blocks
