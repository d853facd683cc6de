"""The steady rate counts each prompt and output token once: those found in the prefix cache too, repeated ones not."""

from dataclasses import replace

import numpy as np
import pytest

from pipemax.sim.workloads import Workload
from tests.unit.sim.machines import simulate, small_node, small_scenario


def equal_requests(num_requests: int, *, prompt: int, output: int, shared: int = 0) -> Workload:
    """Nearly equal, so that the rate up to the drain is about that of the whole run."""
    return Workload(
        name="equal",
        prompt_tokens=np.full(num_requests, prompt),
        output_tokens=(output + np.arange(num_requests) % (output // 2 + 1)).astype(np.int64),
        shared_prefix_tokens=shared,
    )


@pytest.mark.parametrize("system", ["pipemax", "vllm_032_pp"])
def test_tokens_of_a_shared_prefix_are_done_by_each_request_that_finds_them(system: str) -> None:
    workload = equal_requests(600, prompt=400, output=8, shared=360)
    result = simulate(system, small_scenario(workload, small_node(kv_gb=0.3)))
    assert result.steady_tokens_per_s == pytest.approx(result.total_tokens_per_s, rel=0.15)


@pytest.mark.parametrize("system", ["pipemax", "vllm_032_pp"])
def test_tokens_that_are_computed_again_are_done_once(system: str) -> None:
    """The simulation itself counts. Short outputs come first, so PipeMax takes in more than it has room for."""
    requests = equal_requests(200, prompt=40, output=20)
    outputs = np.where(np.arange(200) % 10 == 9, 800, 20)
    late_last = np.argsort(np.arange(200) % 10 >= 5, kind="stable")
    workload = replace(requests, output_tokens=outputs[late_last].astype(np.int64))
    node = replace(small_node(kv_gb=0.06), host_memory_bytes=1e9)
    assert simulate(system, small_scenario(workload, node)).recomputed_tokens > 0
