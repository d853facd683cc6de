"""Compares PipeMax with stock vLLM by simulating both over profiles of nodes and models: ``pipemax plan-capacity``.

Pure: it simulates a sample of the table and takes its steady rate for the whole table, so the answer comes in seconds;
the drain at the table's end is not included. ``measured_choice`` does the same for an engine that has started.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

import numpy as np

from pipemax.domain.specs import ModelSpec, NodeSpec
from pipemax.domain.workload import WorkloadSpec
from pipemax.sim.result import SimulationResult
from pipemax.sim.systems.catalog import simulate
from pipemax.sim.systems.scenario import Scenario
from pipemax.sim.workloads import draw_workload

_SECONDS_PER_HOUR = 3600.0
SAMPLE_REQUESTS = 1500
STOCK_SYSTEMS = ("vllm_032_pp", "vllm_tp")
WORTHWHILE_GAIN = 1.03
"""What is not the default is chosen from this ratio on: below it, the simulations cannot tell the two apart."""


class ChosenPolicy(StrEnum):
    """The policy that an engine runs under."""

    PIPEMAX = "pipemax"
    VLLM = "vllm"


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityOption:
    """One way to run the table on one node."""

    system: str
    gpus_per_engine: int
    """n: pipeline stages of one engine, or the GPUs that share each layer; the node runs as many engines as fit."""
    host_memory_bytes: float
    """Host memory of the whole node."""
    tokens_per_s: float
    """Prompts and outputs of the whole node, without the drain."""
    mean_decode_batch: float
    hours: float
    cost: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyChoice:
    """The choice between PipeMax and stock vLLM, and the reason for it."""

    chosen: ChosenPolicy
    reason: str
    """One clause, for people."""
    predicted_tokens_per_s: Mapping[str, float] = field(default_factory=dict)
    """Policy → tokens/s of prompts and outputs; empty if nothing had to be simulated."""
    inputs: Mapping[str, float | str] = field(default_factory=dict)
    """The inputs of the simulations."""
    settings: Mapping[str, int | str] = field(default_factory=dict)
    """Fields of the engine config with which the chosen policy was the fastest, where they are not the engine's own."""

    @property
    def speedup(self) -> float:
        """The predicted ratio of PipeMax's rate to stock vLLM's."""
        return (
            self.predicted_tokens_per_s[ChosenPolicy.PIPEMAX] / self.predicted_tokens_per_s[ChosenPolicy.VLLM]
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityPlan:
    """All options, fastest first."""

    rows: int
    options: list[CapacityOption]
    choice: PolicyChoice
    not_possible: list[str]
    """What was left out, and why."""

    @property
    def best(self) -> CapacityOption:
        return self.options[0]


def verdict(speedup: float) -> tuple[ChosenPolicy, str]:
    """Return the policy for a predicted ratio of PipeMax's rate to stock vLLM's, and why in a few words."""
    if speedup >= WORTHWHILE_GAIN:
        return ChosenPolicy.PIPEMAX, "PipeMax is faster"
    return ChosenPolicy.VLLM, f"PipeMax gains less than {WORTHWHILE_GAIN - 1:.0%}"


def plan_capacity(
    node: NodeSpec,
    model: ModelSpec,
    statistics: WorkloadSpec,
    *,
    rows: int,
    price_per_hour: float,
    host_memory_bytes: Sequence[float] = (),
    gpus_per_engine: Sequence[int] = (),
    sample_requests: int = SAMPLE_REQUESTS,
    seed: int = 0,
) -> CapacityPlan:
    """Predict hours and cost of ``rows`` rows on one node, for PipeMax and for stock vLLM.

    ``host_memory_bytes`` are the sizes to compare (default: the node's own), ``gpus_per_engine`` the ways to divide
    the node (default: whole, and in halves). Host memory that holds the KV of the whole sample cannot be told from
    more: raise ``sample_requests`` to compare large sizes. Raise ``ValueError`` if the model does not fit in any way.
    """
    if rows < 1 or price_per_hour < 0:
        raise ValueError(f"rows must be at least 1 and price_per_hour not negative: {rows}, {price_per_hour}")
    workload = draw_workload(statistics, sample_requests, np.random.default_rng(seed))
    sizes = list(host_memory_bytes) or [node.host_memory_bytes]
    options: list[CapacityOption] = []
    not_possible: list[str] = []
    for num_gpus in gpus_per_engine or sorted({node.num_gpus, max(1, node.num_gpus // 2)}, reverse=True):
        # Stock vLLM keeps nothing on the host: one size is enough.
        runs = [("pipemax", size) for size in sizes] + [(system, sizes[0]) for system in STOCK_SYSTEMS]
        for system, size in runs:
            try:
                part = replace(node, host_memory_bytes=size).part(num_gpus)
                result = simulate(system, Scenario(node=part, model=model, workload=workload))
            except ValueError as error:
                not_possible.append(f"{system} with {num_gpus} GPUs an engine: {error}")
                continue
            options.append(_option(result, node, num_gpus, size, rows, price_per_hour))
    options.sort(key=lambda option: -option.tokens_per_s)
    return CapacityPlan(
        rows=rows, options=options, choice=_choose(options, not_possible), not_possible=not_possible
    )


def _option(
    result: SimulationResult,
    node: NodeSpec,
    num_gpus: int,
    host_bytes: float,
    rows: int,
    price_per_hour: float,
) -> CapacityOption:
    tokens_per_s = result.steady_tokens_per_s * (node.num_gpus // num_gpus)
    tokens_per_row = (result.prompt_tokens + result.output_tokens) / result.num_requests
    hours = rows * tokens_per_row / tokens_per_s / _SECONDS_PER_HOUR
    return CapacityOption(
        system=result.system,
        gpus_per_engine=num_gpus,
        host_memory_bytes=host_bytes,
        tokens_per_s=tokens_per_s,
        mean_decode_batch=result.mean_decode_batch,
        hours=hours,
        cost=hours * price_per_hour,
    )


def _choose(options: Sequence[CapacityOption], not_possible: Sequence[str]) -> PolicyChoice:
    """Choose from options sorted by speed. Raise ``ValueError`` if one of the two policies has none."""
    pipemax = next((option for option in options if option.system == "pipemax"), None)
    stock = next((option for option in options if option.system != "pipemax"), None)
    if pipemax is None or stock is None:
        raise ValueError("; ".join(not_possible))
    speedup = pipemax.tokens_per_s / stock.tokens_per_s
    figures = (
        f"simulated {pipemax.tokens_per_s:,.0f} tokens/s for PipeMax ({pipemax.gpus_per_engine} stages, decode "
        f"batches of {pipemax.mean_decode_batch:.0f}) against {stock.tokens_per_s:,.0f} for stock vLLM "
        f"({stock.system}, {stock.gpus_per_engine} GPUs, batches of {stock.mean_decode_batch:.0f}): {speedup:.2f}×"
    )
    chosen, why = verdict(speedup)
    return PolicyChoice(
        chosen=chosen,
        reason=f"{why}: {figures}",
        predicted_tokens_per_s={
            ChosenPolicy.PIPEMAX: pipemax.tokens_per_s,
            ChosenPolicy.VLLM: stock.tokens_per_s,
        },
        inputs={"vllm_system": stock.system},
    )
