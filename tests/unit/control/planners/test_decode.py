"""Which members of a batch run while steps are in flight."""

import pytest

from pipemax.control.controller_config import usual_num_batches
from pipemax.domain.plan import Phase, StepPlan
from pipemax.domain.units import RequestId
from tests.unit.control.fake_engine import FakeEngine, small_config, spec, stage

REQUESTS = ("a", "b", "c", "d")


def decode_steps(*, num_stages: int, num_outputs: int, max_tokens: int) -> list[StepPlan]:
    """Of four requests in as many batches as stages, with one step more in flight."""
    engine = FakeEngine(
        config=small_config(num_batches=num_stages, stages=(stage(),) * num_stages),
        max_in_flight=num_stages + 1,
    )
    for name in REQUESTS:
        engine.admit(spec(name, 40, max_tokens), num_outputs)
    engine.run()
    return [plan for plan in engine.plans if plan.phase is Phase.DECODE]


def runs_of(name: str, plans: list[StepPlan]) -> int:
    return sum(RequestId(name) in plan.run for plan in plans)


def test_as_many_batches_as_stages_keep_one_step_more_in_flight() -> None:
    plans = decode_steps(num_stages=2, num_outputs=50, max_tokens=50)
    # The first decode step waits for the prompts' step, just before it.
    assert all(plan.run for plan in plans[1:80]), "a step is empty because a batch's tokens are on their way"


def test_no_step_is_planned_behind_the_last_token_that_a_request_may_have() -> None:
    plans = decode_steps(num_stages=2, num_outputs=50, max_tokens=50)
    assert [runs_of(name, plans) for name in REQUESTS] == [49] * 4, "the prompt's step makes the first token"


def test_a_request_that_ends_early_is_computed_once_in_vain() -> None:
    plans = decode_steps(num_stages=2, num_outputs=50, max_tokens=100)
    assert [runs_of(name, plans) for name in REQUESTS] == [50] * 4


def test_over_one_stage_a_token_is_known_before_the_next_is_planned() -> None:
    plans = decode_steps(num_stages=1, num_outputs=50, max_tokens=100)
    assert [runs_of(name, plans) for name in REQUESTS] == [49] * 4


@pytest.mark.parametrize(
    ("num_stages", "max_steps_in_flight", "num_batches"),
    [(1, 1, 2), (1, 2, 2), (2, 2, 2), (2, 3, 2), (4, 4, 4), (4, 5, 4), (8, 9, 8)],
)
def test_batches_are_as_many_as_keep_all_stages_busy(
    num_stages: int, max_steps_in_flight: int, num_batches: int
) -> None:
    assert usual_num_batches(num_stages, max_steps_in_flight) == num_batches
