"""No parked request waits longer than ``ControllerConfig.overdue_iterations`` says."""

import math
from random import Random

import pytest

from pipemax.domain.plan import Batching
from pipemax.domain.units import RequestId
from tests.unit.control.fake_engine import FakeEngine, small_config, spec, stage

HOST_BLOCKS = 400
OVERDUE = 20
SHARE = small_config().overdue_budget_fraction


@pytest.mark.parametrize("batching", Batching)
@pytest.mark.parametrize("num_batches", [2, 3, 4])
def test_overdue_requests_come_back_while_their_share_of_the_budgets_copies_the_host_pool_twice(
    num_batches: int, batching: Batching
) -> None:
    """Most requests are longer than a budget of about five blocks."""
    rng = Random(7)
    engine = FakeEngine(
        config=small_config(
            num_batches=num_batches,
            batching=batching,
            mixed_step_tokens=64,
            gpu_blocks=60,
            host_blocks=HOST_BLOCKS,
            overdue_iterations=OVERDUE,
            stages=(stage(h2d_bytes_per_s=1e7), stage()),
        ),
        checks_integrity=False,
        checks_each_run=False,
    )
    for index in range(40):
        engine.admit(spec(f"r{index}", rng.randint(5, 200), 200), rng.randint(20, 200))
    table = engine.controller._table
    overdue: dict[RequestId, int] = {}
    """The blocks of the shares since a request became overdue."""
    num_came_back = 0
    while engine.sequences:
        plan = engine.step()
        share = math.ceil(SHARE * plan.decision.budget_blocks) if plan.decision.iteration else 0
        late = [state.id for state in table.parked_by_age() if table.steps_parked(state) >= OVERDUE]
        num_came_back += len(overdue.keys() - late)
        overdue = {request_id: overdue.get(request_id, 0) + share for request_id in late}
        assert all(blocks <= 2 * HOST_BLOCKS for blocks in overdue.values())
    assert num_came_back >= 10
