"""Compares the ways to run a table on a node that need not be there: ``pipemax plan-capacity``.

A layout divides the node's GPUs into replicas of an engine, each of some pipeline stages, each of some GPUs that share
its layers (tensor parallelism). Each layout is simulated with stock vLLM, and those of several stages with PipeMax in
phases and with mixed steps too, each with the size of a step that is fastest. What the model's heads or the
GPUs' memory do not allow is left out, with the reason. Pure: rows that fill an engine several times are simulated to
their end, PipeMax's in grains of several tokens; their steady rate counts for the bulk of the table, and their drain
once. A shorter table is simulated as a whole, token by token.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from pipemax.domain.plan import Batching
from pipemax.domain.specs import ModelSpec, NodeSpec
from pipemax.domain.tuned import ENOUGH_OUTPUTS
from pipemax.domain.units import ceil_div
from pipemax.domain.workload import WorkloadSpec
from pipemax.policy.compare import ChosenPolicy, verdict
from pipemax.policy.layout_runs import (
    ALL_SIZES,
    LARGE_STEPS,
    StepSizes,
    engine_scenario,
    rows_that_fill,
    run_pipemax,
    run_stock,
)
from pipemax.policy.layouts import Layout, layout_refusal, possible_layouts
from pipemax.sim.machine import BLOCK_TOKENS
from pipemax.sim.result import SimulationResult, table_seconds
from pipemax.sim.workloads import SampledRows, Workload, draw_workload, grain_of

SAMPLE_ROWS = 6000
"""Rows simulated for each layout, unless the GPUs need more to be full or the host's pool is full with fewer."""
_ALL_REDUCE_LIMITS, _IDLE_LIMITS, _LINK_LIMITS = 0.2, 0.25, 0.8


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
    """Prompts and outputs of the whole node: without the drain, unless each engine was simulated with all its rows."""
    mean_decode_batch: float
    hours: float
    """Of the whole table, with the drain at its end; without starting engines, and reading and writing the table."""
    cost: float | None
    """``None`` without a price."""
    limited_by: str

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
    statistics: WorkloadSpec | SampledRows,
    *,
    rows: int,
    price_per_hour: float | None = None,
    host_memory_bytes: Sequence[float] = (),
    gpus_per_engine: Sequence[int] = (),
    sample_rows: int | None = None,
    sizes: StepSizes = ALL_SIZES,
    has_waves: bool = False,
    stock_only: str | None = None,
    seed: int = 0,
    on_progress: Callable[[int, int], None] | None = None,
) -> CapacityPlan:
    """Predict hours and cost of ``rows`` rows on one node, for every layout and policy.

    ``host_memory_bytes`` are the sizes to compare for PipeMax (default: the node's own), ``gpus_per_engine`` the sizes
    of an engine (default: all that divide the node). With ``has_waves`` PipeMax's waves are on. ``stock_only`` says why
    only stock vLLM runs the model, as the end of "it …". ``sample_rows`` are
    simulated at most; layouts whose engines they do not fill are left out. By default there are as many as fill all
    engines. Host memory that holds the KV of the whole sample cannot be told from more: raise ``sample_rows`` to
    compare large sizes. ``on_progress`` is called with the simulated and all layouts.
    Raise ``ValueError`` if the model does not fit in any way, or ``sample_rows`` fill no layout's engines.
    """
    if rows < 1 or (price_per_hour is not None and price_per_hour < 0):
        raise ValueError(f"rows must be at least 1 and price_per_hour not negative: {rows}, {price_per_hour}")
    not_possible: list[str] = []
    possible: list[Layout] = []
    for layout in possible_layouts(node, gpus_per_engine):
        if (refusal := layout_refusal(node, model, layout)) is not None:
            not_possible.append(f"{layout}: {refusal}")
        else:
            possible.append(layout)
    sample, needed = _sample(node, model, statistics, possible, rows=rows, sample_rows=sample_rows, seed=seed)
    filled = [layout for layout in possible if needed[layout] <= len(sample)]
    not_possible += [
        f"{layout}: {len(sample):,} rows do not fill its engines, {needed[layout]:,} would (--sample)"
        for layout in possible
        if layout not in filled
    ]
    memories = host_memory_bytes or [node.host_memory_bytes]
    cases = [(layout, index, size) for layout in filled for index, size in enumerate(memories)]
    options: list[CapacityOption] = []
    for done, (layout, index, size) in enumerate(cases):
        if on_progress is not None:
            on_progress(done, len(cases))
        options += options_of(
            replace(node, host_memory_bytes=size),
            model,
            layout,
            sample,
            rows=rows,
            price_per_hour=price_per_hour,
            with_stock=index == 0,  # stock vLLM keeps nothing on the host: one size is enough
            with_pipemax=stock_only is None,
            sizes=sizes,
            has_waves=has_waves,
        )
    if possible and not filled:
        raise ValueError(
            f"{len(sample):,} rows fill the engines of no layout, {min(needed.values()):,} would those of one: raise "
            "--sample, or leave it out, and as many rows are drawn as fill all engines"
        )
    if not options:
        raise ValueError("; ".join(not_possible))
    options.sort(key=lambda option: option.hours)
    chosen, reason = _choose(options, stock_only)
    return CapacityPlan(rows=rows, options=options, chosen=chosen, reason=reason, not_possible=not_possible)


def _sample(
    node: NodeSpec,
    model: ModelSpec,
    statistics: WorkloadSpec | SampledRows,
    layouts: Sequence[Layout],
    *,
    rows: int,
    sample_rows: int | None,
    seed: int,
) -> tuple[Workload, dict[Layout, int]]:
    """Return the rows to simulate, and how many of them each layout needs to be full, at most those of its engines."""

    def draw(count: int) -> Workload:
        rng = np.random.default_rng(seed)
        if isinstance(statistics, SampledRows):
            return statistics.draw(count, rng)
        return draw_workload(statistics, count, rng)

    sample = draw(sample_rows or SAMPLE_ROWS)
    needed = {
        layout: min(
            ceil_div(rows, layout.replicas), rows_that_fill(node, model, layout, sample.tokens_per_row)
        )
        for layout in layouts
    }
    enough = max(needed.values(), default=0)
    return (draw(enough) if sample_rows is None and enough > len(sample) else sample), needed


def options_of(
    node: NodeSpec,
    model: ModelSpec,
    layout: Layout,
    sample: Workload,
    *,
    rows: int,
    price_per_hour: float | None = None,
    with_stock: bool = True,
    with_pipemax: bool = True,
    sizes: StepSizes = ALL_SIZES,
    has_waves: bool = False,
) -> list[CapacityOption]:
    """Simulate a layout that ``layout_refusal`` allows, under each policy, for a table of ``rows`` rows like these."""
    engine_rows = sample.first(ceil_div(rows, layout.replicas))
    scenario = engine_scenario(node, model, layout, engine_rows)
    is_whole = len(scenario.workload) * layout.replicas >= rows
    runs = []
    if with_stock:
        stock_sizes = (*sizes.stock, *LARGE_STEPS) if layout.pipeline_parallel == 1 else sizes.stock
        runs.append((run_stock(scenario, layout, stock_sizes, is_whole_table=is_whole), 1))
    if with_pipemax:
        grain, mixed = 1, sizes.mixed_of_short_tables
        if not is_whole:
            mixed = sizes.mixed
            grain = grain_of(sample, BLOCK_TOKENS, enough_outputs=ENOUGH_OUTPUTS)
            scenario = engine_scenario(node, model, layout, engine_rows, grain=grain)
        pipemax = run_pipemax(scenario, layout, mixed, has_waves=has_waves, is_whole_table=is_whole)
        runs += [(run, grain) for run in pipemax]
    options = []
    for run, grain in runs:
        hours = grain * _hours(run.result, layout.replicas, rows)
        options.append(
            CapacityOption(
                layout=layout,
                policy=run.policy,
                batching=run.batching,
                chunk_tokens=run.chunk_tokens,
                host_memory_bytes=node.host_memory_bytes,
                tokens_per_s=run.tokens_per_s,
                mean_decode_batch=run.result.mean_decode_batch,
                hours=hours,
                cost=None if price_per_hour is None else hours * price_per_hour,
                limited_by=limiting_factor(run.result),
            )
        )
    return options


def _hours(result: SimulationResult, replicas: int, rows: int) -> float:
    """Return the hours of a table, an n-th of them in grains of n tokens.

    A part that was simulated as a whole takes what it took.
    """
    if result.num_requests * replicas >= rows:
        return result.seconds / 3600.0
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


def _choose(options: Sequence[CapacityOption], stock_only: str | None) -> tuple[CapacityOption, str]:
    """Return the option to take, and why, in one clause; ``options`` are sorted by their hours."""
    stock = next(option for option in options if option.policy is ChosenPolicy.VLLM)
    pipemax = next((option for option in options if option.policy is ChosenPolicy.PIPEMAX), None)
    if stock_only is not None:
        return stock, f"PipeMax does not run this model: it {stock_only}"
    if pipemax is None:
        return stock, "PipeMax needs an engine of two stages or more, and the model fits in no such layout"
    speedup = stock.hours / pipemax.hours
    chosen, why = verdict(speedup)
    return (pipemax if chosen is ChosenPolicy.PIPEMAX else stock), (
        f"{why}: simulated {pipemax.tokens_per_s:,.0f} tokens/s ({pipemax}) against "
        f"{stock.tokens_per_s:,.0f} ({stock}), {speedup:.2f}×"
    )
