"""The bench of the controller's decisions times steps that decode, under either batching."""

import pytest

from lab.bench import plan_step
from pipemax.domain.plan import Batching


@pytest.mark.parametrize("batching", list(Batching))
def test_steps_that_decode_are_timed(batching: Batching) -> None:
    row = plan_step.measure(1500, 50, batching)
    assert row.requests == 1500
    assert row.mean_batch > 10
    assert 0 < row.median_ms <= row.p99_ms <= row.max_ms
