"""Decisions as they were: a change of policy shows here first. To take new ones over, see ``scenarios.py``."""

from pathlib import Path

import pytest

from pipemax.control.decision_trace import explain, replay
from pipemax.domain.plain_values import encode
from pipemax.domain.plan import Phase, PhaseReason, PrefetchMode, StepPlan
from tests.golden.scenarios import SCENARIOS, TRACES, record


def plans(name: str) -> list[StepPlan]:
    return [recorded for recorded, _ in replay(TRACES / f"{name}.jsonl")]


def test_every_scenario_has_its_trace_and_no_other() -> None:
    assert {path.stem for path in TRACES.glob("*.jsonl")} == set(SCENARIOS)


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_recorded_events_give_the_recorded_plans(name: str) -> None:
    for recorded, now in replay(TRACES / f"{name}.jsonl"):
        assert encode(now) == encode(recorded), f"step {recorded.step_id}"


@pytest.mark.parametrize("name", SCENARIOS)
def test_recording_again_gives_the_same_bytes(name: str, tmp_path: Path) -> None:
    record(name, tmp_path / "now.jsonl")
    assert (tmp_path / "now.jsonl").read_text() == (TRACES / f"{name}.jsonl").read_text()


@pytest.mark.parametrize("name", SCENARIOS)
def test_every_step_is_explained(name: str) -> None:
    steps = [line for line in explain(TRACES / f"{name}.jsonl") if line.startswith("step ")]
    assert len(steps) == len(plans(name))


def test_the_traces_together_show_every_kind_of_decision() -> None:
    """What no trace shows, no trace guards."""
    all_plans = [plan for name in SCENARIOS for plan in plans(name)]
    assert {plan.phase for plan in all_plans} == set(Phase)
    modes = {plan.decision.prefetch_mode for plan in all_plans}
    assert modes == set(PrefetchMode) - {PrefetchMode.STATIC}
    reasons = {plan.decision.reason for plan in all_plans}
    assert reasons >= set(PhaseReason) - {PhaseReason.START, PhaseReason.AWAIT_INPUT}
    assert any(plan.recompute for plan in all_plans)
    assert any(not item.is_last for plan in all_plans for item in plan.prefetch)
