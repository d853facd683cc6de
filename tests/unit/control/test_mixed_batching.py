"""Mixed batching: what each step holds, what throttles prompts, and that no request is ever lost or stuck."""

from dataclasses import replace
from random import Random
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from pipemax.control.controller_config import ControllerConfig
from pipemax.domain.events import GpuBlocksObserved
from pipemax.domain.plan import Batching, Phase, PhaseReason, PrefetchMode, StepPlan
from pipemax.domain.request import PrefixId, SharedPrefix
from pipemax.domain.step_times import StepTimeModel
from tests.property.test_liveness_properties import FAULTS, PREFIXES, Row, check, pools, rows, run_all
from tests.unit.control.fake_engine import FakeEngine, Faults, small_config, spec, stage

LONGEST_PREFIX_BLOCKS = max(PREFIXES.values()) // 16


def mixed_config(**changes: object) -> ControllerConfig:
    return small_config(**({"batching": Batching.MIXED} | changes))


@st.composite
def mixed_pools(draw: st.DrawFn) -> dict[str, Any]:
    return draw(pools()) | {
        "batching": Batching.MIXED,
        "mixed_step_tokens": draw(st.sampled_from([None, 1, 5, 33, 200])),
        "mixed_live_watermark": draw(st.sampled_from([0.5, 1.0, 3.0, 100.0])),
    }


def check_plans(engine: FakeEngine) -> None:
    """The fake engine itself checks the steps' tokens, and the blocks."""
    assert {plan.phase for plan in engine.plans} <= {Phase.MIXED}
    for plan in engine.plans:
        why = plan.decision
        # Making room may drop the last holder of a prefix that the budget did not count.
        most = why.budget_blocks + (LONGEST_PREFIX_BLOCKS * len(plan.prefetch) if plan.evict else 0)
        if why.prefetch_mode is not PrefetchMode.FORCED:
            assert why.prefetched_blocks <= most, plan
        assert not {item.request_id for item in plan.prefetch} & {*plan.run}, plan


@given(
    data=st.data(),
    changes=mixed_pools(),
    faults=st.one_of(st.just(Faults()), FAULTS),
    seed=st.integers(0, 2**16),
    max_in_flight=st.integers(1, 6),
)
def test_every_request_finishes_whatever_the_pools_and_the_faults(
    data: st.DataObject, changes: dict[str, Any], faults: Faults, seed: int, max_in_flight: int
) -> None:
    most_tokens = 16 * min(changes["gpu_blocks"], changes["host_blocks"])
    table = data.draw(rows(most_tokens, prefixes=True))
    engine = run_all(changes, table, faults, seed, max_in_flight)
    check(engine, table)
    check_plans(engine)


# What a step holds.


def busy_engine(num_requests: int = 40, **changes: object) -> FakeEngine:
    """More KV than the GPU holds, and room for all of it on the host."""
    engine = FakeEngine(config=mixed_config(**({"mixed_step_tokens": 64, "gpu_blocks": 60} | changes)))
    for index in range(num_requests):
        engine.admit(spec(f"r{index:03}", 40 + 31 * (index % 5), 60), 50)
    return engine


def decodes(plan: StepPlan) -> tuple[str, ...]:
    return plan.run[: plan.num_decodes]


def chunks(plan: StepPlan) -> tuple[str, ...]:
    assert plan.num_decodes is not None
    return plan.run[plan.num_decodes :]


def test_prompts_fill_every_step_up_to_its_maximum_while_they_wait() -> None:
    engine = busy_engine(mixed_live_watermark=100.0)
    while (plan := engine.step()).decision.num_waiting:
        assert sum(plan.run_tokens) == 64 or plan.is_empty, plan
    assert any(decodes(plan) and chunks(plan) for plan in engine.plans)


def test_prompts_are_begun_first_come_first_served_and_phases_never_switch() -> None:
    engine = busy_engine()
    engine.run()
    begun = list(dict.fromkeys(request for plan in engine.plans for request in chunks(plan)))
    assert begun == sorted(begun)
    assert engine.controller.num_switches == 0
    assert engine.controller.phase is Phase.MIXED


def test_no_decode_waits_for_a_prompt() -> None:
    """All of D_i decodes on its turn, apart from what left the GPU for others to grow."""
    engine = busy_engine()
    while engine.sequences:
        rotation = engine.controller._rotation
        members = {state.id for state in rotation.batches[rotation.executing].members}
        plan = engine.step()
        if chunks(plan) and plan.decision.executing_batch == rotation.executing:
            assert members - {*decodes(plan)} <= {*plan.evict}, plan


def test_the_engine_s_chunk_is_the_maximum_unless_one_is_named() -> None:
    engine = busy_engine(num_requests=20, mixed_step_tokens=None, prefill_chunk_tokens=100)
    engine.run()
    assert max(sum(plan.run_tokens) for plan in engine.plans) == 100


def test_a_batch_never_has_more_requests_than_a_step_has_tokens() -> None:
    engine = busy_engine(num_requests=12, mixed_step_tokens=3, num_batches=3)
    engine.run()
    assert max(len(plan.run) for plan in engine.plans) == 3


def test_a_complete_prompt_decodes_in_the_batch_that_computed_its_last_chunk() -> None:
    engine = busy_engine(num_requests=6, gpu_blocks=100)
    engine.run()
    last_chunk = {request: plan for plan in engine.plans for request in chunks(plan)}
    for request, plan in last_chunk.items():
        later = next(p for p in engine.plans if p.step_id > plan.step_id and request in decodes(p))
        assert later.decision.executing_batch == plan.decision.executing_batch, request


# The throttle.


def test_no_prompt_is_begun_while_enough_is_parked() -> None:
    engine = busy_engine(mixed_live_watermark=1.5)
    begun: set[str] = set()
    while engine.sequences:
        plan = engine.step()
        new = {*chunks(plan)} - begun
        if plan.decision.reason is PhaseReason.ENOUGH_PARKED:
            assert not new, plan
        begun |= new
        if new:
            assert plan.decision.live_blocks <= 1.5 * 60 + 64 // 16 + len(plan.run)
    assert any(plan.decision.reason is PhaseReason.ENOUGH_PARKED for plan in engine.plans)
    assert max(plan.decision.num_parked for plan in engine.plans) > 0


def test_no_prompt_is_begun_that_the_host_pool_has_no_room_for() -> None:
    engine = busy_engine(host_blocks=100, initial_output_tokens=50)
    engine.run()
    assert any(plan.decision.reason is PhaseReason.HOST_FULL for plan in engine.plans)
    assert min(plan.decision.free_host_blocks for plan in engine.plans) >= 5
    assert not any(plan.recompute for plan in engine.plans)


def test_with_two_batches_live_kv_is_parked_and_members_of_the_next_batch_change_places() -> None:
    engine = busy_engine(num_batches=2)
    engine.max_in_flight = 2
    engine.run()
    assert max(plan.decision.num_parked for plan in engine.plans) > 0
    swapped = [plan for plan in engine.plans if plan.prefetch and plan.evict]
    assert swapped
    for plan in engine.plans:
        assert not {item.request_id for item in plan.prefetch} & set(plan.evict)


def test_with_two_batches_what_a_step_completes_is_not_evicted_in_the_same_step() -> None:
    """A request that comes in parts joins D_j with its last part, and D_j is where room is made for others."""
    changes = {
        "gpu_blocks": 14,
        "host_blocks": 30,
        "num_batches": 2,
        "prefill_chunk_tokens": 7,
        "max_num_seqs": 16,
        "max_resident_requests": 5,
        "initial_output_tokens": None,
        "stages": (stage(h2d_bytes_per_s=4e7), stage(h2d_bytes_per_s=4e7)),
        "steady_window": 1,
        "overdue_iterations": 1,
        "host_high_watermark": 0.5,
        "max_prefetch_requests": 1,
        "batching": Batching.MIXED,
        "mixed_live_watermark": 0.5,
    }
    short = [(1, outputs) for outputs in (1, 1, 1, 1, 1, 1, 1, 1, 7, 7, 1, 8, 1, 8)]
    table = [*short, (15, 4), (1, 5), (1, 1), (4, 1), (21, 1), (38, 1)]
    requests = [Row(prompt, outputs, outputs, None) for prompt, outputs in table]
    check(run_all(changes, requests, Faults(), seed=0, max_in_flight=1), requests)


def test_input_may_wait_even_while_the_host_pool_is_full() -> None:
    controller = busy_engine(host_blocks=100).controller
    assert controller.admission_demand_tokens < 0
    empty = FakeEngine(config=mixed_config(host_blocks=100)).controller
    assert empty.admission_demand_tokens == 95 * 16
    full = busy_engine(num_requests=9, host_blocks=100, initial_output_tokens=60)
    while full.step().decision.num_waiting:
        pass
    assert full.controller.admission_demand_tokens >= 10 * 16


# Prefetch and balance.


def test_the_prefetch_budget_follows_from_the_whole_step_s_predicted_time() -> None:
    slow_prompts = replace(
        stage(), prefill_time=StepTimeModel.linear(alpha_s=1e-3, beta_s=0.0, delta_s=0.001)
    )
    engine, num_mixed = busy_engine(stages=(slow_prompts,)), 0
    while engine.sequences:
        bytes_per_s = engine.controller.times.h2d[0].bytes_per_s
        plan = engine.step()
        if decodes(plan):
            prompt_tokens = sum(plan.run_tokens) - len(decodes(plan))
            assert plan.decision.predicted_step_s > 0.01 * 0.8 + 1e-3 * 0.8 * prompt_tokens
            assert plan.decision.budget_blocks == int(bytes_per_s * plan.decision.predicted_step_s / 16_000)
            num_mixed += prompt_tokens > 0
    assert num_mixed > 20


def test_a_prompt_s_prefix_is_computed_once() -> None:
    engine = FakeEngine(config=mixed_config(mixed_step_tokens=80, gpu_blocks=60))
    prefix = SharedPrefix(prefix_id=PrefixId("instruction"), num_tokens=64)
    for index in range(12):
        engine.admit(spec(f"r{index}", 80, 30, prefix=prefix), 20)
    engine.run()
    computed = sum(sum(plan.run_tokens[plan.num_decodes :]) for plan in engine.plans)
    assert computed <= 2 * 80 + 10 * 16


class NthDraw(Random):
    """Draws 0.0 once, at the n-th draw, and 1.0 otherwise."""

    def __init__(self, n: int) -> None:
        super().__init__(0)
        self._left = n

    def random(self) -> float:
        self._left -= 1
        return 0.0 if self._left == 0 else 1.0


def test_the_younger_of_two_half_done_prompts_gives_way() -> None:
    """A refused run leaves both begun, and the block that the older one needs is taken by somebody else."""
    rng = NthDraw(9)  # the older prompt's last chunk, in whose step the younger one begins
    config = mixed_config(gpu_blocks=11, mixed_step_tokens=32)
    engine = FakeEngine(config=config, rng=rng, faults=Faults(refuse_run=0.5), max_in_flight=1)
    for name in ("older", "younger"):
        engine.admit(spec(name, 140, 10), 5)
    for _ in range(5):
        engine.step()
    assert (engine.plans[4].run, engine.plans[4].run_tokens) == (("older", "younger"), (12, 20))
    engine.controller.apply([GpuBlocksObserved(num_free=0)])
    engine.run()
    assert [request for plan in engine.plans for request in plan.recompute] == ["younger"]
