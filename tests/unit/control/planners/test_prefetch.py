"""The prefetch budget, and what is done with it."""

from dataclasses import replace
from itertools import pairwise

import pytest

from pipemax.control.controller import Controller
from pipemax.control.controller_config import ControllerConfig
from pipemax.control.planners.prefetch import PrefetchPlanner, SteadyDetector
from pipemax.control.state.batches import Rotation
from pipemax.control.state.table import RequestTable
from pipemax.control.times.estimator import PhaseWork
from pipemax.control.times.stage_estimators import StageEstimators
from pipemax.domain.events import StepTimed, TransferTimed
from pipemax.domain.plan import Phase, PrefetchMode, StepId
from tests.unit.control.fake_engine import FakeEngine, Faults, small_config, spec, stage
from tests.unit.control.tables import park_lengths, parked, resident, roomy_table


def decode_plans(engine: FakeEngine) -> list:
    engine.run()
    return [plan for plan in engine.plans if plan.phase is Phase.DECODE]


def busy_engine(num_requests: int = 40, **changes: object) -> FakeEngine:
    engine = FakeEngine(config=small_config(**changes))
    for index in range(num_requests):
        engine.admit(spec(f"r{index}", 40 + 11 * (index % 17), 40), 30 + index % 11)
    return engine


def test_the_budget_is_the_least_over_the_stages() -> None:
    slow_link = stage(h2d_bytes_per_s=2e7)
    more_layers = replace(stage(), kv_bytes_per_token=3000)
    times = StageEstimators(small_config(stages=(stage(), slow_link, more_layers)))
    assert times.budget_blocks((0.01, 0.01, 0.01)) == 8  # 4e7 · 0.01 / (3000 · 16)
    assert times.budget_blocks((0.01, 0.002, 0.01)) == 2  # 2e7 · 0.002 / (1000 · 16)


def test_no_step_copies_more_than_its_budget_or_evicts_what_runs_next() -> None:
    plans = decode_plans(busy_engine())
    prefetching = [plan for plan in plans if plan.prefetch and plan.run]
    assert prefetching
    for plan in prefetching:
        assert plan.decision.prefetched_blocks <= plan.decision.budget_blocks
    for plan, following in pairwise(plans):
        if plan.run and following.run:
            assert not set(plan.evict) & set(following.run)


def test_what_was_prefetched_runs_in_the_next_step_or_was_moved_to_a_lighter_batch() -> None:
    plans = [plan for plan in decode_plans(busy_engine()) if plan.run]
    num_arrived = num_ran = 0
    for plan, following in pairwise(plans):
        if plan.decision.next_batch != following.decision.executing_batch:
            continue  # a batch without members was passed over
        arrived = {item.request_id for item in plan.prefetch if item.is_last}
        num_arrived += len(arrived)
        num_ran += len(arrived & set(following.run))
    assert num_arrived > 20
    assert num_ran > 0.8 * num_arrived


def test_short_requests_come_first_until_the_budget_has_settled() -> None:
    modes = [plan.decision.prefetch_mode for plan in decode_plans(busy_engine()) if plan.prefetch]
    assert modes[0] is PrefetchMode.WARM_UP
    assert PrefetchMode.STEADY in modes
    first_steady = modes.index(PrefetchMode.STEADY)
    assert PrefetchMode.WARM_UP not in modes[first_steady:]


def test_a_budget_is_steady_once_its_variation_within_the_window_is_small() -> None:
    detector = SteadyDetector(window=4, threshold=0.1)
    for budget in (10, 20, 40, 80, 100):
        detector.observe(budget)
        assert not detector.is_steady
    for budget in (101, 99, 102):
        detector.observe(budget)
    assert detector.is_steady
    detector.observe(5)
    assert detector.is_steady  # the tail is no second warm-up
    detector.reset()
    assert not detector.is_steady


def test_a_request_longer_than_the_budget_comes_in_parts_and_finishes() -> None:
    engine = FakeEngine(
        config=small_config(
            gpu_blocks=60, stages=(stage(h2d_bytes_per_s=8e6),), prefill_chunk_tokens=512, num_batches=3
        )
    )
    engine.admit(spec("giant", 600, 60), 60)  # 38 blocks; a step hides about 5
    for index in range(30):
        engine.admit(spec(f"r{index}", 60, 40), 30)
    plans = decode_plans(engine)
    parts = [item for plan in plans for item in plan.prefetch if item.request_id == "giant"]
    assert any(item.is_first and not item.is_last for item in parts)
    assert sum(not item.is_first for item in parts) >= 2
    assert engine.finished["giant"] == 60


def test_nothing_resident_forces_a_copy_that_no_step_hides() -> None:
    engine = FakeEngine(
        config=small_config(num_batches=2, gpu_blocks=20, max_num_seqs=4, stages=(stage(),)),
        faults=Faults(refuse_prefetch=0.5),
    )
    for index in range(8):
        engine.admit(spec(f"r{index}", 100, 60), 60)
    modes = [plan.decision.prefetch_mode for plan in decode_plans(engine)]
    assert PrefetchMode.FORCED in modes


def prefetch_planner(config: ControllerConfig, table: RequestTable) -> PrefetchPlanner:
    """Four batches of one short resident each."""
    rotation = Rotation(config.num_batches)
    for index, batch in enumerate(rotation.batches):
        resident(table, f"resident{index}", 20, batch=batch)
    return PrefetchPlanner(config, table, rotation, StageEstimators(config))


@pytest.mark.parametrize("steps_parked", [9, 11])
def test_an_overdue_request_saves_its_share_of_the_budget_up(steps_parked: int) -> None:
    """Longest first would take one of the long ones for ever: with it, too little of the budget is left."""
    config, table = small_config(overdue_iterations=10, steady_window=1, steady_threshold=1.0), roomy_table()
    planner = prefetch_planner(config, table)
    parked(table, "middle", 200)  # 13 blocks; a step hides 25, a quarter of which is for those overdue
    park_lengths(table, [310] * 50)
    table.begin_plan(steps_parked)
    prefetched = [[item.request_id for item in planner.plan((0.0101,)).items] for _ in range(4)]
    assert ["middle" in ids for ids in prefetched] == [False, steps_parked > 10, False, False]
    assert all(prefetched)


def test_measured_times_change_the_prefetch_budget() -> None:
    config = small_config()
    times = StageEstimators(config)
    engine = busy_engine()
    plans = decode_plans(engine)
    assert engine.controller.times.decode_error()[0].num_steps > 100
    assert engine.controller.times.decode_error()[0].worst < 0.2
    assert plans
    before = times.budget_blocks((0.01,))
    for number in range(200):
        times.remember(StepId(number), PhaseWork(phase=Phase.DECODE, size=1, kv_tokens=1), 10)
        times.observe_transfer(TransferTimed(step_id=StepId(number), num_blocks=10, stage_s=(0.016,)))
    assert times.budget_blocks((0.01,)) < before / 3


def test_times_for_another_number_of_stages_are_refused() -> None:
    with pytest.raises(ValueError, match="2 times for 1 stages"):
        Controller(small_config()).apply([StepTimed(step_id=StepId(0), stage_s=(0.1, 0.1))])
