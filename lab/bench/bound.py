"""The most that PipeMax can reach in a layout, for a fraction of the time of its simulation."""

from dataclasses import replace

from pipemax.policy.layouts import Layout
from pipemax.sim.machine import prefill_step_tokens
from pipemax.sim.systems.continuous import ContinuousBatching, stock_vllm
from pipemax.sim.systems.scenario import Scenario

_SIZES = (256, 512, 1024, 2048)
_BOUNDLESS = 2**60
"""Bytes of a GPU whose KV pool holds everything."""


def pipemax_bound(scenario: Scenario, layout: Layout) -> float | None:
    """Return the tokens/s of all replicas that PipeMax reaches in this layout at most, or None if it has one stage.

    PipeMax keeps in host memory what does not fit on the GPUs. So it cannot be faster than mixed steps on GPUs that
    hold the KV of all rows, which are simulated here, with steps as large as those of its prompts too. Its phases may
    be, by a few percent.
    """
    if layout.pipeline_parallel == 1:
        return None
    node = replace(scenario.node, gpu=replace(scenario.node.gpu, memory_bytes=_BOUNDLESS))
    boundless = replace(scenario, node=node)
    policies = [
        replace(stock_vllm(tokens, tensor=layout.tensor_parallel), max_running=None)
        for tokens in sorted({*_SIZES, prefill_step_tokens(scenario.node, scenario.model)})
    ]
    rates = [ContinuousBatching(boundless, policy).simulate().steady_tokens_per_s for policy in policies]
    return max(rates) * layout.replicas
