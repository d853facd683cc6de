"""Whatever the lengths and the pools, every system finishes every request once, and keeps the order of time."""

import pytest
from hypothesis import given, settings

from lab.paper.catalog import simulate
from tests.property.test_sim_conservation import TABLES, check_conservation


@pytest.mark.parametrize(
    "system", ["td_pipe", "td_pipe_tuned", "seesaw_t4", "seesaw_t2p2", "flexgen", "tightllm"]
)
@settings(max_examples=6, deadline=None)
@given(**TABLES)
def test_every_token_is_generated(
    system: str, requests: list[tuple[int, int]], kv_gb: float, host_gb: float
) -> None:
    check_conservation(simulate, system, requests, kv_gb, host_gb)
