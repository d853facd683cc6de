"""Simulates one engine of a layout under each policy, with the size of a step that is fastest.

``pipemax_estimate`` costs a fraction of a simulation of PipeMax, and says roughly what PipeMax reaches. Pure.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

from pipemax.control.controller_config import usual_num_batches, waves_refusal
from pipemax.domain.plan import Batching
from pipemax.domain.specs import KvCapacity, ModelSpec, NodeSpec, freeing_windows_pays, kv_capacity
from pipemax.domain.tuned import GPU_POOL_FILLS, HOST_POOL_FILLS, MIXED_TOKENS_TO_TRY, WAVE_GROUPS
from pipemax.policy.compare import ChosenPolicy
from pipemax.policy.layouts import LARGEST_STEP_TOKENS, Layout
from pipemax.policy.measured_choice import fastest, phases_may_be_faster
from pipemax.sim.machine import BLOCK_TOKENS, prefill_step_tokens
from pipemax.sim.result import SimulationResult
from pipemax.sim.stage_times import StageTimes, StepWork
from pipemax.sim.systems.continuous import ContinuousBatching, stock_vllm
from pipemax.sim.systems.pipemax import PipeMaxSystem
from pipemax.sim.systems.pipemax_config import (
    PipeMaxOptions,
    mixed_batching,
    stage_configs,
)
from pipemax.sim.systems.scenario import Scenario
from pipemax.sim.workloads import Workload, in_grains

MAX_NUM_SEQS = 1024
"""vLLM's own default on GPUs of 70 GiB and more. It allows no more requests at once than a step has tokens."""
_FEWEST_ROWS = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSizes:
    """The sizes of a step, in tokens, among which the fastest is searched; ascending."""

    stock: tuple[int, ...]
    """Of stock vLLM."""
    mixed: tuple[int, ...]
    """Of PipeMax with mixed batching."""
    mixed_of_short_tables: tuple[int, ...]
    """The same, where the whole table is simulated."""


ALL_SIZES = StepSizes(
    stock=(256, 512, 1024, 2048, LARGEST_STEP_TOKENS),
    mixed=MIXED_TOKENS_TO_TRY,
    mixed_of_short_tables=(256, *MIXED_TOKENS_TO_TRY),
)
LARGE_STEPS = (8192, 16384)
"""vLLM's defaults on GPUs, which stock vLLM may have where no other stage waits for a long step."""
_ESTIMATE_SIZES = (256, 512, 1024, 2048)
_PROMPT_TOKENS_OF_STEP, _FIXED_POINT_STEPS = 512, 12


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutRun:
    """A layout under one policy, as one of its engines was simulated."""

    layout: Layout
    policy: ChosenPolicy
    batching: Batching | None
    """PipeMax's; None for stock vLLM."""
    chunk_tokens: int
    """Maximum tokens of a step; of a prefill step under separated batching."""
    result: SimulationResult
    """Of one engine."""
    is_bound: bool = False
    """Whether the layout makes no more than this, rather than this."""
    is_whole_table: bool = False
    """Whether the engine had all its rows of the table, so that the drain at the end counts."""

    @property
    def tokens_per_s(self) -> float:
        """Prompts and outputs of all replicas together; of a part of a table without the drain."""
        return _rate(self.result, is_whole_table=self.is_whole_table) * self.layout.replicas

    def __str__(self) -> str:
        how = "stock vLLM" if self.batching is None else f"PipeMax, {self.batching}"
        return f"{how}, steps of {self.chunk_tokens:,}"


def engine_scenario(
    node: NodeSpec,
    model: ModelSpec,
    layout: Layout,
    sample: Workload,
    *,
    stops_at_drain: bool = False,
    enough_rows: int | None = None,
    all_rows: bool = False,
    grain: int = 1,
) -> Scenario:
    """Return one engine's part of the node, with ``all_rows`` of the sample or as many as fill its pools.

    More than ``enough_rows`` are there only if the GPUs hold so many: host memory is then not filled. Tokens come in
    grains of so many (``pipemax.sim.workloads.in_grains``).
    """
    if model.recurrent is not None:  # stock vLLM keeps no state of a prefix
        sample = replace(sample, shared_prefix_tokens=0)
    part = node.part(layout.gpus_per_engine)
    capacity = capacity_of(part, model, layout)
    host_tokens = capacity.host_blocks * capacity.block_tokens
    tokens_per_row = sample.tokens_per_row
    held_rows = capacity_of(part, model, layout, frees_windows=True).gpu_rows(tokens_per_row)
    gpu_rows = int(GPU_POOL_FILLS * held_rows)
    host_rows = int(HOST_POOL_FILLS * host_tokens / tokens_per_row)
    if enough_rows is not None:
        host_rows = min(host_rows, enough_rows)
    rows = len(sample) if all_rows else max(_FEWEST_ROWS, gpu_rows, host_rows)
    return Scenario(
        node=part,
        model=model.in_grains(grain),
        workload=in_grains(sample.first(rows), grain),
        grain=grain,
        stops_at_drain=stops_at_drain,
    )


def rows_that_fill(node: NodeSpec, model: ModelSpec, layout: Layout, tokens_per_row: float) -> int:
    """Return how many rows an engine must be simulated with to be seen at its steady rate.

    They fill its GPUs ``GPU_POOL_FILLS`` times: with KV, or with as many rows as its stages run at once.
    """
    part = node.part(layout.gpus_per_engine)
    held_rows = capacity_of(part, model, layout, frees_windows=True).gpu_rows(tokens_per_row)
    return max(1, int(GPU_POOL_FILLS * min(held_rows, layout.pipeline_parallel * MAX_NUM_SEQS)))


def capacity_of(
    part: NodeSpec,
    model: ModelSpec,
    layout: Layout,
    *,
    block_tokens: int = BLOCK_TOKENS,
    frees_windows: bool = False,
) -> KvCapacity:
    """Return the KV blocks of one engine on its part of a node; ``frees_windows`` as under stock vLLM."""
    return kv_capacity(
        part, model, layout.parallelism, block_tokens=block_tokens, frees_windows=frees_windows
    )


def _rate(result: SimulationResult, *, is_whole_table: bool) -> float:
    """Return the tokens/s that count: to the end of a whole table, until the drain of a part of one."""
    return result.total_tokens_per_s if is_whole_table else result.steady_tokens_per_s


def run_stock(
    scenario: Scenario,
    layout: Layout,
    sizes: Sequence[int] = ALL_SIZES.stock,
    *,
    is_whole_table: bool = False,
) -> LayoutRun:
    """Simulate stock vLLM with the fastest of these sizes of a step."""

    def simulate(tokens: int) -> SimulationResult:
        policy = stock_vllm(
            tokens, tensor=layout.tensor_parallel, max_num_seqs=MAX_NUM_SEQS, keeps_preempted=True
        )
        return ContinuousBatching(scenario, policy).simulate()

    tokens, result = _at_best_size(sizes, simulate, is_whole_table=is_whole_table)
    return LayoutRun(
        layout=layout,
        policy=ChosenPolicy.VLLM,
        batching=None,
        chunk_tokens=tokens,
        result=result,
        is_bound=result.fell_below,
        is_whole_table=is_whole_table,
    )


def run_pipemax(
    scenario: Scenario,
    layout: Layout,
    sizes: Sequence[int] = ALL_SIZES.mixed,
    *,
    always_in_phases: bool = True,
    frees_windows: bool | None = False,
    has_waves: bool = False,
    is_whole_table: bool = False,
) -> list[LayoutRun]:
    """Simulate PipeMax in phases, and with the fastest of these sizes of mixed steps.

    Unless ``always_in_phases``, phases are simulated only where they may be faster than mixed steps.
    ``frees_windows`` is the engine config's.
    The list is empty if the layout has one stage: no batch waits while another computes. It is also empty for a model
    with recurrent layers, if the KV of a row does not fit, of which stock vLLM keeps less where layers have windows,
    and where an engine refuses waves that it is to have.
    """
    if scenario.model.recurrent is not None:
        return []
    workload = scenario.workload
    longest = int((workload.prompt_tokens + workload.output_tokens).max())
    node, model = scenario.node, scenario.model
    if frees_windows is None:
        frees_windows = freeing_windows_pays(
            node,
            model,
            layout.parallelism,
            block_tokens=scenario.block_tokens,
            tokens_per_row=workload.tokens_per_row,
        )
    frees_windows = frees_windows and model.window_tokens is not None
    capacity = capacity_of(
        node, model, layout, block_tokens=scenario.block_tokens, frees_windows=frees_windows
    )
    needed = capacity.groups.prompt_blocks(longest, capacity.block_tokens, in_flight_tokens=0)
    num_stages = layout.pipeline_parallel
    num_batches = usual_num_batches(num_stages, num_stages + 1)
    is_refused = has_waves and waves_refusal(num_batches, capacity.groups) is not None
    if num_stages == 1 or capacity.gpu_blocks < needed or is_refused:
        return []

    def simulate(scenario: Scenario, tokens: int | None) -> SimulationResult:
        controller = _waves(has_waves) | ({} if tokens is None else mixed_batching(tokens))
        options = PipeMaxOptions(
            tensor=layout.tensor_parallel, controller=controller, frees_windows=frees_windows
        )
        return PipeMaxSystem(scenario, options).simulate()

    rate = partial(_rate, is_whole_table=is_whole_table)
    mixed: dict[int, SimulationResult] = {}
    for size in sizes:
        to_beat = max([scenario.stops_below, *map(rate, mixed.values())])
        mixed[size] = simulate(replace(scenario, stops_below=to_beat), size)
    tokens = max(mixed, key=lambda tokens: rate(mixed[tokens]))
    runs = [(Batching.MIXED, tokens, mixed[tokens])]
    if always_in_phases or phases_may_be_faster(capacity, workload, num_stages):
        prompt_tokens = prefill_step_tokens(scenario.node, scenario.model)
        phases = simulate(replace(scenario, stops_below=0.0), None)
        runs.insert(0, (Batching.SEPARATED, prompt_tokens, phases))
    return [
        LayoutRun(
            layout=layout,
            policy=ChosenPolicy.PIPEMAX,
            batching=batching,
            chunk_tokens=size,
            result=result,
            is_bound=result.fell_below,
            is_whole_table=is_whole_table,
        )
        for batching, size, result in runs
    ]


def _waves(has_waves: bool) -> dict[str, Any]:
    """Return the fields of the controller's config that say so."""
    return {"wave_groups": WAVE_GROUPS} if has_waves else {}


def pipemax_estimate(
    scenario: Scenario, layout: Layout, *, has_waves: bool = False, is_whole_table: bool = False
) -> float | None:
    """Return roughly the tokens/s of all replicas that PipeMax reaches in this layout, or None if it has one stage.

    That is continuous batching on GPUs with room for what PipeMax copies to them too: up to p blocks a step for each
    batch but the one that computes (n of the paper; its batches hold M/n + p(1 − 2/n) of M blocks). p follows from the
    link and the time of a step, which follows from the room. In waves they hold M/n + p(1 − 1.25/n), so that there is
    room for up to p blocks more. It costs a twentieth of a simulation of PipeMax.
    """
    if layout.pipeline_parallel == 1 or scenario.model.recurrent is not None:
        return None
    bigger = replace(
        scenario.node.gpu, memory_bytes=_memory_with_copies(scenario, layout, has_waves=has_waves)
    )
    larger = replace(scenario, node=replace(scenario.node, gpu=bigger))

    def simulate(tokens: int) -> SimulationResult:
        policy = replace(stock_vllm(tokens, tensor=layout.tensor_parallel), max_running=None)
        return ContinuousBatching(larger, policy).simulate()

    _, result = _at_best_size(_ESTIMATE_SIZES, simulate, is_whole_table=is_whole_table)
    return _rate(result, is_whole_table=is_whole_table) * layout.replicas


def _memory_with_copies(scenario: Scenario, layout: Layout, *, has_waves: bool) -> int:
    """Return the bytes of a GPU that holds what PipeMax holds on it and in flight to it."""
    node, workload = scenario.node, scenario.workload
    capacity = capacity_of(node, scenario.model, layout, block_tokens=scenario.block_tokens)
    times = StageTimes(node, scenario.model, layout.parallelism)
    options = PipeMaxOptions(tensor=layout.tensor_parallel, controller=_waves(has_waves))
    stages = stage_configs(node, times, options, block_tokens=scenario.block_tokens)
    num_copied = len(stages) if has_waves else len(stages) - 1
    kv_of_row = float((workload.prompt_tokens + workload.output_tokens / 2).mean())
    copied_blocks = 0.0
    for _ in range(_FIXED_POINT_STEPS):
        room_blocks = min(capacity.gpu_blocks + num_copied * copied_blocks, capacity.host_blocks)
        kv_tokens = room_blocks * capacity.block_tokens / len(stages)
        work = StepWork(
            decode_requests=max(1, int(kv_tokens / kv_of_row)),
            decode_context_tokens=int(kv_tokens),
            prefill_tokens=_PROMPT_TOKENS_OF_STEP,
            prefill_pairs=_PROMPT_TOKENS_OF_STEP * kv_of_row / 2,
        )
        step_s = max(times.stage_s(work))
        copied_blocks = min(
            stage.h2d_bytes_per_s * step_s / (capacity.block_tokens * stage.kv_bytes_per_token)
            for stage in stages
        )
    more_blocks = max(0.0, room_blocks - capacity.gpu_blocks)
    block_bytes = capacity.block_tokens * max(stage.kv_bytes_per_token for stage in stages)
    return int(node.gpu.memory_bytes + more_blocks * block_bytes / node.gpu_memory_fraction)


def _at_best_size(
    sizes: Sequence[int], simulate: Callable[[int], SimulationResult], *, is_whole_table: bool
) -> tuple[int, SimulationResult]:
    run = cache(simulate)
    tokens = fastest(sizes, lambda size: _rate(run(size), is_whole_table=is_whole_table))
    return tokens, run(tokens)
