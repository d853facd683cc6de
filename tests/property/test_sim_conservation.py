"""Whatever the lengths and the pools, every system finishes every request once, and keeps the order of time."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipemax.sim.workloads import Workload
from tests.unit.sim.machines import SYSTEMS, simulate, small_node, small_scenario

Simulate = Callable[..., Any]
PROMPTS = st.one_of(st.integers(1, 40), st.sampled_from([15, 16, 17, 33, 500, 1500]))
OUTPUTS = st.one_of(st.integers(1, 40), st.sampled_from([1, 2, 16, 17, 300]))


TABLES = {
    "requests": st.lists(st.tuples(PROMPTS, OUTPUTS), min_size=1, max_size=40),
    "kv_gb": st.sampled_from([0.2, 0.3, 1.0]),
    "host_gb": st.sampled_from([2.0, 8.0]),
}


def check_conservation(
    simulate: Simulate, system: str, requests: list[tuple[int, int]], kv_gb: float, host_gb: float
) -> None:
    """Simulate a table on a small node, and check that every request ends and that time keeps its order."""
    lengths = np.array(requests, dtype=np.int64)
    workload = Workload(name="adversarial", prompt_tokens=lengths[:, 0], output_tokens=lengths[:, 1])
    node = small_node(kv_gb=kv_gb, host_gb=host_gb)
    result = simulate(system, small_scenario(workload, node))
    assert result.num_requests == len(requests)
    assert result.seconds > 0
    samples = [sample.time_s for sample in result.recording.decode_samples]
    assert samples == sorted(samples)
    assert sum(sample.batch for sample in result.recording.decode_samples) <= workload.total_tokens * 10


@pytest.mark.parametrize("system", SYSTEMS)
@settings(max_examples=6, deadline=None)
@given(**TABLES)
def test_every_token_is_generated(
    system: str, requests: list[tuple[int, int]], kv_gb: float, host_gb: float
) -> None:
    check_conservation(simulate, system, requests, kv_gb, host_gb)
