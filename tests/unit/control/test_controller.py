"""What ``apply`` and ``plan_step`` promise: order, refusals, waiting for input, liveness, the demand for input."""

from itertools import pairwise

import pytest

from pipemax.control.controller import Controller
from pipemax.domain.events import (
    Event,
    InputEnded,
    InputOpened,
    PrefetchRefused,
    RequestAborted,
    RequestAdmitted,
    RequestPreempted,
    RunRefused,
    StepCompleted,
)
from pipemax.domain.plan import Phase, PhaseReason, StepId
from pipemax.domain.request import PrefixId, RequestSpec, SharedPrefix
from pipemax.domain.units import RequestId
from tests.unit.control.fake_engine import FakeEngine, small_config, spec


def controller_with(*requests: RequestSpec, **changes: object) -> Controller:
    controller = Controller(small_config(**changes))
    controller.apply([RequestAdmitted(request=request) for request in requests])
    return controller


def test_a_request_that_can_never_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="request r may need 101 blocks, more than the smaller pool's 100"):
        controller_with(spec("r", 1500, 117))
    controller_with(spec("r", 1500, 101))


def test_a_live_id_is_refused() -> None:
    with pytest.raises(ValueError, match="r is admitted already"):
        controller_with(spec("r", 10), spec("r", 10))


def test_one_prefix_has_one_length() -> None:
    def sharing(name: str, num_tokens: int) -> RequestSpec:
        return spec(name, 90, prefix=SharedPrefix(prefix_id=PrefixId("p"), num_tokens=num_tokens))

    with pytest.raises(ValueError, match="prefix p has 40 tokens, not 50"):
        controller_with(sharing("a", 40), sharing("b", 50))


def test_steps_complete_in_the_order_in_which_they_were_planned() -> None:
    controller = controller_with(spec("r", 1000))
    first, second = controller.plan_step(0.0), controller.plan_step(0.0)
    with pytest.raises(ValueError, match="step 1 completed, but the oldest in flight is 0"):
        controller.apply([StepCompleted(step_id=second.step_id)])
    controller.apply([StepCompleted(step_id=first.step_id), StepCompleted(step_id=second.step_id)])
    with pytest.raises(ValueError, match="the oldest in flight is None"):
        controller.apply([StepCompleted(step_id=StepId(2))])


@pytest.mark.parametrize(
    "event",
    [
        RunRefused(step_id=StepId(7), request_id=RequestId("r")),
        RunRefused(step_id=StepId(0), request_id=RequestId("else")),
        PrefetchRefused(step_id=StepId(0), request_id=RequestId("r")),
        StepCompleted(step_id=StepId(0), finished=(RequestId("else"),)),
    ],
)
def test_events_that_contradict_the_last_plan_are_refused(event: Event) -> None:
    controller = controller_with(spec("r", 100))
    controller.plan_step(0.0)
    with pytest.raises(ValueError, match=r"step|prefetch"):
        controller.apply([event])


def test_a_request_with_all_its_tokens_must_finish() -> None:
    controller = controller_with(spec("r", 100, 1))
    plan = controller.plan_step(0.0)
    with pytest.raises(ValueError, match="have max_tokens outputs and did not finish"):
        controller.apply([StepCompleted(step_id=plan.step_id)])


def test_events_about_requests_that_are_gone_are_ignored() -> None:
    controller = controller_with(spec("r", 100))
    plan = controller.plan_step(0.0)
    gone = RequestId("r")
    controller.apply([RequestAborted(request_id=gone), RequestAborted(request_id=gone)])
    controller.apply([RequestPreempted(request_id=gone), StepCompleted(step_id=plan.step_id)])
    controller.check_integrity()
    assert controller.num_unfinished == 0


def test_a_refused_step_is_planned_again() -> None:
    controller = controller_with(spec("r", 100))
    plan = controller.plan_step(0.0)
    controller.apply([RunRefused(step_id=plan.step_id, request_id=RequestId("r"))])
    controller.check_integrity()
    again = controller.plan_step(0.0)
    assert (again.run, again.run_tokens) == (plan.run, plan.run_tokens)


def test_nothing_to_do_is_an_empty_plan() -> None:
    plan = Controller(small_config()).plan_step(0.0)
    assert plan.is_empty
    assert plan.wait_until_s is None
    assert plan.decision.reason is PhaseReason.START


def test_open_input_is_awaited_until_its_grace_is_over() -> None:
    controller = controller_with(spec("r", 100), input_grace_s=0.25)
    controller.apply([InputOpened()])
    plan = controller.plan_step(1.0)
    controller.apply([StepCompleted(step_id=plan.step_id)])
    waiting = controller.plan_step(1.1)
    assert waiting.is_empty
    assert waiting.decision.reason is PhaseReason.AWAIT_INPUT
    assert waiting.wait_until_s == pytest.approx(1.35)
    assert controller.plan_step(1.2).wait_until_s == pytest.approx(1.35)
    assert controller.plan_step(1.36).phase is Phase.DECODE


def test_ended_input_is_not_awaited() -> None:
    controller = controller_with(spec("r", 100))
    controller.apply([InputOpened(), InputEnded()])
    plan = controller.plan_step(0.0)
    controller.apply([StepCompleted(step_id=plan.step_id)])
    assert controller.plan_step(0.0).phase is Phase.DECODE


def test_the_demand_for_input_shrinks_by_what_is_admitted() -> None:
    controller = Controller(small_config())
    assert controller.admission_demand_tokens == 950 * 16
    controller.apply([RequestAdmitted(request=spec("r", 100, 61))])  # 10 blocks at its end
    assert controller.admission_demand_tokens == 940 * 16
    controller.plan_step(0.0)
    assert controller.admission_demand_tokens == 940 * 16


def test_host_overflow_is_survived_by_recomputing_the_youngest() -> None:
    engine = FakeEngine(config=small_config(gpu_blocks=30, host_blocks=40, initial_output_tokens=1))
    for index in range(12):
        engine.admit(spec(f"r{index:02}", 40, 150), 150)
    engine.run()
    assert len(engine.finished) == 12
    recomputed = [request for plan in engine.plans for request in plan.recompute]
    assert recomputed
    assert "r00" not in recomputed


def test_reservations_to_the_utmost_never_recompute() -> None:
    engine = FakeEngine(config=small_config(gpu_blocks=30, host_blocks=40, host_high_watermark=1.0))
    for index in range(12):
        engine.admit(spec(f"r{index}", 40, 150), 150)
    engine.run()
    assert not any(plan.recompute for plan in engine.plans)


def test_the_partition_is_recomputed_at_each_switch_to_decode() -> None:
    engine = FakeEngine(config=small_config(host_blocks=120, gpu_blocks=60))
    for index in range(40):
        engine.admit(spec(f"r{index}", 60, 40), 40)
    engine.run()
    plans = [plan for plan in engine.plans if plan.run]
    switches = [
        following
        for plan, following in pairwise(plans)
        if plan.phase is Phase.PREFILL and following.phase is Phase.DECODE
    ]
    assert len(switches) >= 2
    assert all(plan.decision.iteration <= engine.config.num_batches for plan in switches)
    assert engine.controller.num_switches == 2 * len(switches) - 1


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_batches", 0),
        ("gpu_blocks", 0),
        ("stages", ()),
        ("host_high_watermark", 1.5),
        ("gpu_low_watermark", 0.0),
        ("min_refill_fraction", 1.0),
        ("steady_threshold", -0.1),
        ("steady_window", 0),
        ("overdue_budget_fraction", 0.0),
        ("mixed_step_tokens", 0),
        ("mixed_live_watermark", 0.0),
    ],
)
def test_bad_settings_are_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=name):
        small_config(**{name: value})
