"""Compares the ways to run a table on a node that need not be there: ``pipemax plan-capacity``.

A layout divides the node's GPUs into replicas of an engine, each of some pipeline stages, each of some GPUs that share
its layers (tensor parallelism). Each layout is simulated with stock vLLM, and those of several stages with PipeMax in
phases and with mixed steps too, each with the size of a step that is fastest. What the model's heads or the
GPUs' memory do not allow is left out, with the reason. Pure: a sample of the table is simulated to its end, its steady
rate counts for the bulk of the table, and its drain once.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from pipemax.domain.plan import Batching
from pipemax.domain.specs import ModelSpec, NodeSpec, Parallelism, kv_capacity
from pipemax.domain.workload import WorkloadSpec
from pipemax.policy.compare import ChosenPolicy, verdict
from pipemax.policy.fleet import NodeWork
from pipemax.policy.measured_choice import fastest
from pipemax.sim.machine import BLOCK_TOKENS, prefill_step_tokens
from pipemax.sim.result import SimulationResult, table_seconds
from pipemax.sim.systems.continuous import ContinuousBatching, vllm_032
from pipemax.sim.systems.pipemax import PipeMaxSystem
from pipemax.sim.systems.pipemax_config import PipeMaxOptions, mixed_batching
from pipemax.sim.systems.scenario import Scenario
from pipemax.sim.workloads import Workload, draw_workload

SAMPLE_ROWS = 6000
"""Rows simulated for each layout at most. With fewer than fill the pools, PipeMax is seen at its beginning only."""
MAX_NUM_SEQS = 1024
"""vLLM's own default on GPUs of 70 GiB and more. It allows no more requests at once than a step has tokens."""
_GPU_POOL_FILLS, _HOST_POOL_FILLS, _FEWEST_ROWS = 3.0, 1.5, 200
_ALL_REDUCE_LIMITS, _IDLE_LIMITS, _LINK_LIMITS = 0.2, 0.25, 0.8


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSizes:
    """The sizes of a step, in tokens, among which the fastest is searched; ascending."""

    stock: tuple[int, ...]
    """Of stock vLLM."""
    mixed: tuple[int, ...]
    """Of PipeMax with mixed batching."""


ALL_SIZES = StepSizes(stock=(256, 512, 1024, 2048, 4096), mixed=(256, 512, 1024, 2048))


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """One way to divide a node's GPUs."""

    replicas: int
    """Engines that run next to one another, each with its part of the rows."""
    tensor_parallel: int
    """GPUs that share each layer."""
    pipeline_parallel: int
    """Stages of an engine."""

    @property
    def gpus_per_engine(self) -> int:
        return self.tensor_parallel * self.pipeline_parallel

    def __str__(self) -> str:
        return f"{self.replicas} × tp {self.tensor_parallel} × pp {self.pipeline_parallel}"


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityOption:
    """One layout under one policy, with its fastest size of a step."""

    layout: Layout
    policy: ChosenPolicy
    batching: Batching | None
    """PipeMax's; None for stock vLLM."""
    chunk_tokens: int
    """Maximum tokens of a step; of a prefill step under separated batching."""
    host_memory_bytes: float
    """Host memory of the whole node. Stock vLLM keeps nothing there."""
    tokens_per_s: float
    """Prompts and outputs of the whole node, without the drain."""
    mean_decode_batch: float
    hours: float
    """Of the whole table, with the drain at its end; without starting engines, and reading and writing the table."""
    cost: float
    limited_by: str
    work: NodeWork
    """What a fleet of such nodes is predicted by."""

    def __str__(self) -> str:
        how = "stock vLLM" if self.batching is None else f"PipeMax, {self.batching}"
        return f"{how}, {self.layout}, steps of up to {self.chunk_tokens:,} tokens"


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityPlan:
    """All options, fastest first."""

    rows: int
    options: list[CapacityOption]
    chosen: CapacityOption
    """The fastest stock vLLM, unless PipeMax is faster by what is worthwhile."""
    reason: str
    not_possible: list[str]
    """What was left out, and why."""


def plan_capacity(
    node: NodeSpec,
    model: ModelSpec,
    statistics: WorkloadSpec,
    *,
    rows: int,
    price_per_hour: float,
    host_memory_bytes: Sequence[float] = (),
    gpus_per_engine: Sequence[int] = (),
    sample_rows: int = SAMPLE_ROWS,
    sizes: StepSizes = ALL_SIZES,
    seed: int = 0,
) -> CapacityPlan:
    """Predict hours and cost of ``rows`` rows on one node, for every layout and policy.

    ``host_memory_bytes`` are the sizes to compare for PipeMax (default: the node's own), ``gpus_per_engine`` the sizes
    of an engine (default: all that divide the node). Host memory that holds the KV of the whole sample cannot be told
    from more: raise ``sample_rows`` to compare large sizes. Raise ``ValueError`` if the model does not fit in any way.
    """
    if rows < 1 or price_per_hour < 0:
        raise ValueError(f"rows must be at least 1 and price_per_hour not negative: {rows}, {price_per_hour}")
    sample = draw_workload(statistics, sample_rows, np.random.default_rng(seed))
    options: list[CapacityOption] = []
    not_possible: list[str] = []
    for layout in possible_layouts(node, gpus_per_engine):
        if (refusal := layout_refusal(node, model, layout)) is not None:
            not_possible.append(f"{layout}: {refusal}")
            continue
        for index, size in enumerate(host_memory_bytes or [node.host_memory_bytes]):
            # Stock vLLM keeps nothing on the host: one size is enough.
            options += options_of(
                replace(node, host_memory_bytes=size),
                model,
                layout,
                sample,
                rows=rows,
                price_per_hour=price_per_hour,
                with_stock=index == 0,
                sizes=sizes,
            )
    if not options:
        raise ValueError("; ".join(not_possible))
    options.sort(key=lambda option: -option.tokens_per_s)
    chosen, reason = _choose(options)
    return CapacityPlan(rows=rows, options=options, chosen=chosen, reason=reason, not_possible=not_possible)


def options_of(
    node: NodeSpec,
    model: ModelSpec,
    layout: Layout,
    sample: Workload,
    *,
    rows: int,
    price_per_hour: float = 0.0,
    with_stock: bool = True,
    with_pipemax: bool = True,
    sizes: StepSizes = ALL_SIZES,
) -> list[CapacityOption]:
    """Simulate a layout that ``layout_refusal`` allows, under each policy, for a table of ``rows`` rows like these."""
    part = node.part(layout.gpus_per_engine)
    scenario = Scenario(node=part, model=model, workload=_rows_to_simulate(part, model, layout, sample))
    options = []
    systems = _systems(scenario, layout, sizes, with_stock=with_stock, with_pipemax=with_pipemax)
    for system in systems:
        result = system.result
        hours = _hours(result, layout.replicas, rows)
        options.append(
            CapacityOption(
                layout=layout,
                policy=system.policy,
                batching=system.batching,
                chunk_tokens=system.chunk_tokens,
                host_memory_bytes=node.host_memory_bytes,
                tokens_per_s=result.steady_tokens_per_s * layout.replicas,
                mean_decode_batch=result.mean_decode_batch,
                hours=hours,
                cost=hours * price_per_hour,
                limited_by=limiting_factor(result),
                work=_node_work(result, layout, scenario, holds_on_host=system.batching is not None),
            )
        )
    return options


def possible_layouts(node: NodeSpec, gpus_per_engine: Sequence[int] = ()) -> list[Layout]:
    """Return all layouts of engines of these sizes, default all that divide the node; the largest engines first.

    ``ValueError`` for a size that does not divide the node.
    """
    for num_gpus in gpus_per_engine:
        node.part(num_gpus)
    sizes = gpus_per_engine or [size for size in range(1, node.num_gpus + 1) if node.num_gpus % size == 0]
    return [
        Layout(replicas=node.num_gpus // size, tensor_parallel=tensor, pipeline_parallel=size // tensor)
        for size in sorted(set(sizes), reverse=True)
        for tensor in range(1, size + 1)
        if size % tensor == 0
    ]


def layout_refusal(node: NodeSpec, model: ModelSpec, layout: Layout) -> str | None:
    """Return why no engine of this layout can run the model, or None."""
    tensor, pipeline = layout.tensor_parallel, layout.pipeline_parallel
    if model.num_heads % tensor:
        return f"{model.name} has {model.num_heads} heads, which {tensor} GPUs do not divide"
    if max(model.num_kv_heads, tensor) % min(model.num_kv_heads, tensor):
        return (
            f"{model.name} has {model.num_kv_heads} KV heads, which {tensor} GPUs neither divide nor repeat"
        )
    if pipeline > model.num_layers:
        return f"{model.name} has {model.num_layers} layers, fewer than {pipeline} stages"
    try:
        kv_capacity(node.part(layout.gpus_per_engine), model, Parallelism(pipeline=pipeline, tensor=tensor))
    except ValueError as error:
        return str(error)
    return None


def _rows_to_simulate(part: NodeSpec, model: ModelSpec, layout: Layout, sample: Workload) -> Workload:
    parallelism = Parallelism(pipeline=layout.pipeline_parallel, tensor=layout.tensor_parallel)
    capacity = kv_capacity(part, model, parallelism, block_tokens=BLOCK_TOKENS)
    host_tokens = capacity.host_blocks * capacity.block_tokens
    tokens = max(_GPU_POOL_FILLS * capacity.gpu_tokens, _HOST_POOL_FILLS * host_tokens)
    return sample.first(max(_FEWEST_ROWS, int(tokens * len(sample) / sample.total_tokens)))


@dataclass(frozen=True, slots=True, kw_only=True)
class _System:
    """A policy with its fastest size of a step."""

    policy: ChosenPolicy
    batching: Batching | None
    chunk_tokens: int
    result: SimulationResult


def _systems(
    scenario: Scenario, layout: Layout, sizes: StepSizes, *, with_stock: bool, with_pipemax: bool
) -> list[_System]:
    """Simulate one engine under each policy that can run it."""
    found: list[_System] = []
    if with_stock:
        tokens, result = _at_best_size(
            sizes.stock,
            lambda tokens: ContinuousBatching(
                scenario,
                vllm_032(
                    tokens, tensor=layout.tensor_parallel, max_num_seqs=MAX_NUM_SEQS, keeps_preempted=True
                ),
            ).simulate(),
        )
        found.append(_System(policy=ChosenPolicy.VLLM, batching=None, chunk_tokens=tokens, result=result))
    if not with_pipemax or layout.pipeline_parallel == 1:
        return found  # no batch waits while another computes
    tensor = layout.tensor_parallel
    phases = PipeMaxSystem(scenario, PipeMaxOptions(tensor=tensor)).simulate()
    size = prefill_step_tokens(scenario.node, scenario.model)
    found.append(
        _System(policy=ChosenPolicy.PIPEMAX, batching=Batching.SEPARATED, chunk_tokens=size, result=phases)
    )
    tokens, result = _at_best_size(
        sizes.mixed,
        lambda tokens: PipeMaxSystem(
            scenario, PipeMaxOptions(tensor=tensor, controller=mixed_batching(tokens))
        ).simulate(),
    )
    found.append(
        _System(policy=ChosenPolicy.PIPEMAX, batching=Batching.MIXED, chunk_tokens=tokens, result=result)
    )
    return found


def _at_best_size(
    sizes: Sequence[int], simulate: Callable[[int], SimulationResult]
) -> tuple[int, SimulationResult]:
    run = cache(simulate)
    tokens = fastest(sizes, lambda size: run(size).steady_tokens_per_s)
    return tokens, run(tokens)


def _hours(result: SimulationResult, replicas: int, rows: int) -> float:
    seconds = table_seconds(
        rows,
        replicas,
        run_rows=result.num_requests,
        run_tokens=result.prompt_tokens + result.output_tokens,
        run_seconds=result.seconds,
        steady_tokens=result.steady_tokens_per_s * result.steady_seconds,
        steady_seconds=result.steady_seconds,
    )
    return seconds / 3600.0


def _node_work(
    result: SimulationResult, layout: Layout, scenario: Scenario, *, holds_on_host: bool
) -> NodeWork:
    """Return a node's rate and drain. Its engines hold as many rows as fill the pools that they use."""
    tokens_per_row = (result.prompt_tokens + result.output_tokens) / result.num_requests
    parallelism = Parallelism(pipeline=layout.pipeline_parallel, tensor=layout.tensor_parallel)
    capacity = kv_capacity(scenario.node, scenario.model, parallelism, block_tokens=BLOCK_TOKENS)
    held_tokens = capacity.gpu_tokens
    if holds_on_host:
        held_tokens = max(held_tokens, capacity.host_blocks * capacity.block_tokens)
    steady_rows = result.steady_tokens_per_s * result.steady_seconds / tokens_per_row
    return NodeWork(
        rows_per_s=layout.replicas * result.steady_tokens_per_s / tokens_per_row,
        drain_s=result.seconds - result.steady_seconds,
        drain_rows=layout.replicas * (result.num_requests - steady_rows),
        held_rows=layout.replicas * held_tokens / tokens_per_row,
    )


def limiting_factor(result: SimulationResult) -> str:
    """Return what limits a run, in a few words; shares are of the GPUs' time, or of the links'."""
    if result.all_reduce_fraction >= _ALL_REDUCE_LIMITS:
        return f"all-reduce ({result.all_reduce_fraction:.0%})"
    if result.bubble_fraction >= _IDLE_LIMITS and result.h2d_fraction >= _LINK_LIMITS:
        return f"host links ({result.h2d_fraction:.0%})"
    if result.bubble_fraction >= _IDLE_LIMITS:
        return f"idle stages ({result.bubble_fraction:.0%})"
    if result.decode_fraction >= 0.5:
        return f"decode in batches of {result.mean_decode_batch:.0f}"
    return "arithmetic"


def _choose(options: Sequence[CapacityOption]) -> tuple[CapacityOption, str]:
    """Return the option to take, and why, in one clause; ``options`` are sorted by speed."""
    stock = next(option for option in options if option.policy is ChosenPolicy.VLLM)
    pipemax = next((option for option in options if option.policy is ChosenPolicy.PIPEMAX), None)
    if pipemax is None:
        return stock, "PipeMax needs an engine of two stages or more, and the model fits in no such layout"
    chosen, why = verdict(pipemax.tokens_per_s / stock.tokens_per_s)
    return (pipemax if chosen is ChosenPolicy.PIPEMAX else stock), (
        f"{why}: simulated {pipemax.tokens_per_s:,.0f} tokens/s ({pipemax}) against "
        f"{stock.tokens_per_s:,.0f} ({stock}), {pipemax.tokens_per_s / stock.tokens_per_s:.2f}×"
    )
