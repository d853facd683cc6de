"""What is prefetched overwrites members of the batch that executes, behind its computation."""

from itertools import pairwise
from pathlib import Path
from random import Random

import pytest

from pipemax.control.controller import Controller
from pipemax.control.decision_trace import TraceWriter, explain, replay
from pipemax.control.planners.victims import RoomSource, overwrite_for_room
from pipemax.control.state.batches import Batch
from pipemax.control.state.table import RequestTable
from pipemax.domain.events import RequestAborted, RequestAdmitted, RunRefused, StepCompleted
from pipemax.domain.kv_groups import KvGroups
from pipemax.domain.plain_values import encode
from pipemax.domain.plan import Batching, StepPlan
from pipemax.domain.units import RequestId
from tests.unit.control.fake_engine import FakeEngine, small_config, spec
from tests.unit.control.tables import land, parked, resident, roomy_table


def engine_with_waves(num_batches: int = 2, **changes: object) -> FakeEngine:
    config = small_config(num_batches=num_batches, wave_groups=4, **changes)
    engine = FakeEngine(config=config, max_in_flight=num_batches)
    for index in range(60):
        engine.admit(spec(f"r{index}", 40 + 11 * (index % 17), 60), 40 + index % 11)
    return engine


def waves_of(engine: FakeEngine) -> list[StepPlan]:
    engine.run()
    return [plan for plan in engine.plans if plan.overwrite]


@pytest.mark.parametrize("batching", Batching)
@pytest.mark.parametrize("num_batches", [2, 3, 4])
def test_a_wave_overwrites_decodes_of_its_own_step_within_the_budget(
    num_batches: int, batching: Batching
) -> None:
    waves = waves_of(engine_with_waves(num_batches, batching=batching))
    assert len(waves) > 20
    for plan in waves:
        decodes = plan.run if plan.num_decodes is None else plan.run[: plan.num_decodes]
        assert set(plan.overwrite or ()) <= set(decodes)
        assert not set(plan.overwrite or ()) & {item.request_id for item in plan.prefetch}
        assert plan.decision.overwritten_batch == plan.decision.executing_batch
        assert 0 < plan.decision.prefetched_blocks <= plan.decision.budget_blocks


def test_what_a_wave_brings_runs_next_and_what_it_took_does_not() -> None:
    engine = engine_with_waves(2)
    engine.run()
    num_arrived = num_ran = 0
    for plan, following in pairwise([plan for plan in engine.plans if plan.run]):
        if plan.overwrite and plan.decision.next_batch == following.decision.executing_batch:
            assert not set(plan.overwrite) & set(following.run)
            arrived = {item.request_id for item in plan.prefetch if item.is_last}
            num_arrived += len(arrived)
            num_ran += len(arrived & set(following.run))
    assert num_arrived > 20
    assert num_ran > 0.8 * num_arrived


def running(table: RequestTable, name: str, prompt_tokens: int, batch: Batch) -> None:
    """A resident whose next step is planned."""
    state = resident(table, name, prompt_tokens, batch=batch)
    table.advance_decode([state])


def test_the_block_that_the_step_writes_to_stays_until_the_next_plan() -> None:
    table, batch = roomy_table(gpu_blocks=100), Batch()
    running(table, "a", 40, batch)  # 3 blocks; the step writes to the third
    running(table, "b", 48, batch)  # 4 blocks; the step begins the fourth
    source = RoomSource(batch=batch, running={RequestId("a"), RequestId("b")})
    assert source.max_blocks >= 5
    assert table.free_gpu_blocks == 93
    victims = overwrite_for_room(table, source, free_blocks=98)
    assert [state.id for state in victims] == ["b", "a"]
    assert table.free_gpu_blocks == 98
    assert table.num_on_gpu == 2  # the step runs them
    land(table, *victims)
    assert table.num_parked == 2
    table.begin_plan(1)
    assert table.free_gpu_blocks == 100
    assert table.num_on_gpu == 0


def test_only_members_that_run_are_overwritten_and_only_those_that_free_a_block() -> None:
    table, batch = roomy_table(gpu_blocks=100), Batch()
    running(table, "runs", 100, batch)
    running(table, "short", 10, batch)
    resident(table, "waits", 200, batch=batch)
    source = RoomSource(batch=batch, running={RequestId("runs"), RequestId("short")})
    victims = overwrite_for_room(table, source, free_blocks=100)
    assert [state.id for state in victims] == ["runs"]


def test_a_prefix_that_the_plan_shares_is_not_overwritten() -> None:
    table, batch = roomy_table(), Batch()
    running(table, "holder", 50, batch)
    holder = resident(table, "prefix holder", 50, batch=batch, prefix="shared")
    table.advance_decode([holder])
    table.prefetch(parked(table, "sharer", 50, prefix="shared"), Batch())
    source = RoomSource(batch=batch, running={holder.id, RequestId("holder")})
    assert holder not in overwrite_for_room(table, source, free_blocks=10_000)


def in_a_wave() -> tuple[Controller, StepPlan, list[StepPlan]]:
    """A controller whose last plan has a wave, that plan, and the earlier ones in flight."""
    controller = Controller(small_config(num_batches=2, wave_groups=4, gpu_blocks=60))
    rng = Random(0)
    requests = [spec(f"r{index}", rng.randint(50, 150), 60) for index in range(30)]
    controller.apply([RequestAdmitted(request=request) for request in requests])
    in_flight: list[StepPlan] = []
    for _ in range(500):
        plan = controller.plan_step(0.0)
        if plan.overwrite:
            return controller, plan, in_flight
        in_flight += [plan] if plan.run else []
        while len(in_flight) > 1 or (in_flight and not plan.run):
            controller.apply([StepCompleted(step_id=in_flight.pop(0).step_id, finished=())])
    raise AssertionError("no wave in 500 plans")


@pytest.mark.parametrize("completes_first", [False, True], ids=["in flight", "completed"])
def test_a_refused_run_leaves_the_gpu_all_the_same(completes_first: bool) -> None:
    controller, plan, in_flight = in_a_wave()
    assert plan.overwrite
    refused = plan.overwrite[0]
    controller.apply([RunRefused(step_id=plan.step_id, request_id=refused)])
    controller.check_integrity()
    if completes_first:
        steps = [*in_flight, plan]
        controller.apply([StepCompleted(step_id=step.step_id, finished=()) for step in steps])
        controller.check_integrity()
    after = controller.plan_step(0.0)
    controller.check_integrity()
    assert refused not in after.run


def test_a_request_that_is_aborted_in_a_wave_leaves_nothing_behind() -> None:
    controller, plan, _ = in_a_wave()
    assert plan.overwrite
    controller.apply([RequestAborted(request_id=request) for request in plan.overwrite])
    controller.check_integrity()
    # Its id may come again before the next plan.
    controller.apply([RequestAdmitted(request=spec(plan.overwrite[0], 50, 60))])
    controller.plan_step(0.0)
    controller.check_integrity()


def test_a_trace_of_waves_is_replayed_and_explained(tmp_path: Path) -> None:
    path = tmp_path / "waves.jsonl"
    config = small_config(num_batches=2, wave_groups=3)
    with TraceWriter(path, config) as trace:
        engine = FakeEngine(config=config, max_in_flight=2, trace=trace)
        for index in range(30):
            engine.admit(spec(f"r{index}", 100 + index, 40), 30)
        engine.run()
    plans = [*replay(path)]
    assert any(recorded.overwrite for recorded, _ in plans)
    assert all(encode(now) == encode(recorded) for recorded, now in plans)
    assert any("behind the computation" in line for line in explain(path))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"wave_groups": 1}, "wave_groups must be at least 2, not 1"),
        ({"num_batches": 1}, "waves need at least 2 batches"),
        ({"kv_groups": KvGroups(full=1, window=1, window_tokens=32)}, "waves need the whole KV"),
    ],
)
def test_what_waves_cannot_do_is_said_at_the_start(changes: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        small_config(**{"wave_groups": 4, **changes})
