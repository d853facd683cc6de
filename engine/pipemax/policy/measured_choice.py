"""Chooses how an engine whose steps were measured should run: by simulations of the engine itself.

Candidates are PipeMax with mixed and, where it may be faster, with separated batching, and stock vLLM with steps of
several sizes. The sizes of mixed steps come from the calibration: those at which a token costs least. Pure: nothing is
known of running engines.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

from pipemax.domain.choices import BatchingChoice
from pipemax.domain.plan import Batching
from pipemax.domain.specs import KvCapacity
from pipemax.domain.tuned import (
    FEW_ROWS,
    GUESSED_OUTPUTS_GAIN,
    GUESSED_TIMES_GAIN,
    MIXED_TOKENS_TO_TRY,
    SAMPLE_GAIN,
    SHORT_TABLE_TOKENS,
    WORTHWHILE_GAIN,
)
from pipemax.policy.compare import ChosenPolicy, PolicyChoice, verdict
from pipemax.sim.measured_engine import MeasuredEngine
from pipemax.sim.result import SimulationResult
from pipemax.sim.systems.continuous import STOCK_VLLM, ContinuousBatching
from pipemax.sim.systems.pipemax import PipeMaxSystem
from pipemax.sim.systems.pipemax_config import PipeMaxOptions, mixed_batching
from pipemax.sim.systems.scenario import Scenario, measured_scenario
from pipemax.sim.workloads import Workload

STEP_TOKENS = (128, 256, 512, 1024, 2048, 4096, 8192)
"""Sizes of stock vLLM's steps that are simulated, next to the engine's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchingPlan:
    """How PipeMax batches."""

    batching: Batching
    mixed_step_tokens: int | None = None
    """Maximum tokens of a step with mixed batching, None with separated."""

    @property
    def description(self) -> str:
        """What runs, in a few words."""
        if self.mixed_step_tokens is None:
            return "PipeMax in phases"
        return f"PipeMax with mixed steps of up to {self.mixed_step_tokens:,} tokens"

    @property
    def settings(self) -> dict[str, int | str]:
        """The fields of the engine config that say so."""
        if self.mixed_step_tokens is None:
            return {"batching": BatchingChoice.SEPARATED.value}
        return {"batching": BatchingChoice.MIXED.value, "mixed_step_tokens": self.mixed_step_tokens}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """The rows to simulate."""

    workload: Workload
    is_whole_table: bool
    """The time to the end of a whole table counts, of a sample the steady rate."""
    outputs_are_known: bool = True
    """Whether somebody said how long outputs are, or they are a guess."""
    grain: int = 1
    """Tokens of a grain in the simulations of PipeMax (``pipemax.sim.workloads.in_grains``)."""
    stock_grain: int = 1
    """Those of stock vLLM's."""

    def least_gain(self, *, times_are_a_guess: bool = False) -> float:
        """Return the ratio of PipeMax's simulated rate to stock vLLM's from which on PipeMax is chosen."""
        if times_are_a_guess:
            return GUESSED_TIMES_GAIN
        if self.is_whole_table:
            return WORTHWHILE_GAIN
        return SAMPLE_GAIN if self.outputs_are_known else GUESSED_OUTPUTS_GAIN

    def scenario(self, engine: MeasuredEngine, *, grain: int) -> Scenario:
        """Return what is simulated of them."""
        return measured_scenario(engine, self.workload, stops_at_drain=not self.is_whole_table, grain=grain)

    def rate(self, result: SimulationResult) -> float:
        """Return the tokens/s that count."""
        return result.total_tokens_per_s if self.is_whole_table else result.steady_tokens_per_s


def choose_batching(
    engine: MeasuredEngine, rows: Rows, batching: BatchingChoice, mixed_step_tokens: int | None = None
) -> BatchingPlan:
    """Return the fastest of what ``batching`` and ``mixed_step_tokens``, both of the engine config, leave open.

    A single candidate is not simulated.
    """
    plans = batching_plans(engine, rows, batching, mixed_step_tokens)
    return plans[0] if len(plans) == 1 else _fastest_plan(rows, _simulated(engine, rows, plans))


def batching_plans(
    engine: MeasuredEngine, rows: Rows, batching: BatchingChoice, mixed_step_tokens: int | None = None
) -> list[BatchingPlan]:
    """Return the ways to batch that may be the fastest; the arguments are those of ``choose_batching``."""
    sizes: list[int | None] = []
    if batching is not BatchingChoice.SEPARATED:
        knows_lengths = rows.is_whole_table or rows.outputs_are_known
        limits = MIXED_TOKENS_TO_TRY if knows_lengths else MIXED_TOKENS_TO_TRY[-1:]
        if rows.is_whole_table:
            limits = (SHORT_TABLE_TOKENS, *limits)
        cheapest = {cheapest_size(engine, tokens) for tokens in limits}
        sizes += sorted(cheapest) if mixed_step_tokens is None else [mixed_step_tokens]
    may_be_faster = rows.is_whole_table or phases_may_be_faster(
        engine.capacity, rows.workload, engine.num_batches
    )
    if batching is BatchingChoice.SEPARATED or (batching is BatchingChoice.AUTO and may_be_faster):
        sizes.append(None)
    return [
        BatchingPlan(batching=Batching.SEPARATED if size is None else Batching.MIXED, mixed_step_tokens=size)
        for size in sizes
    ]


def phases_may_be_faster(capacity: KvCapacity, workload: Workload, num_batches: int) -> bool:
    """Return whether the GPUs hold so few rows that phases may be faster than mixed steps over a long table."""
    return capacity.gpu_rows(workload.tokens_per_row) < FEW_ROWS * num_batches


def _simulated(
    engine: MeasuredEngine, rows: Rows, plans: Sequence[BatchingPlan], *, to_beat: float = 0.0
) -> dict[BatchingPlan, SimulationResult]:
    """Return a run of each plan. Mixed steps are given up once they are slower than ``to_beat`` or a run before."""
    scenario = rows.scenario(engine, grain=rows.grain)
    runs: dict[BatchingPlan, SimulationResult] = {}
    for plan in plans:
        best, options = max([to_beat, *map(rows.rate, runs.values())]), PipeMaxOptions()
        if plan.mixed_step_tokens is not None:
            options = PipeMaxOptions(controller=mixed_batching(plan.mixed_step_tokens))
        stops_below = 0.0 if plan.mixed_step_tokens is None else best
        runs[plan] = PipeMaxSystem(replace(scenario, stops_below=stops_below), options).simulate()
    return runs


def _fastest_plan(rows: Rows, runs: Mapping[BatchingPlan, SimulationResult]) -> BatchingPlan:
    return max(runs, key=lambda plan: rows.rate(runs[plan]))


def cheapest_size(engine: MeasuredEngine, most_tokens: int) -> int:
    """Return the size of a step, up to ``most_tokens``, at which a token costs least by the calibration.

    Candidates are the ends of the calibration's segments, at which one more token costs most, and the largest size.
    """
    most_tokens = min(most_tokens, engine.max_batched_tokens)
    ends = {
        segment.min_size - 1
        for stage in engine.stages
        for times in (stage.decode_time, stage.prefill_time)
        for segment in times.segments
    }
    sizes = sorted({size for size in ends if STEP_TOKENS[0] <= size < most_tokens} | {most_tokens})
    return min(
        reversed(sizes),
        key=lambda size: max(stage.prefill_time.batch_s(size) for stage in engine.stages) / size,
    )


def fastest(sizes: Sequence[int], rate: Callable[[int], float]) -> int:
    """Return the size with the highest rate: from the middle on, upwards or downwards while it improves."""
    at = start = len(sizes) // 2
    for way in (1, -1):
        while 0 <= at + way < len(sizes) and rate(sizes[at + way]) > rate(sizes[at]):
            at += way
        if at != start:
            break
    return sizes[at]


def compare_policies(
    engine: MeasuredEngine,
    rows: Rows,
    *,
    inputs: Mapping[str, float | str],
    batching: BatchingChoice = BatchingChoice.AUTO,
    mixed_step_tokens: int | None = None,
    chunk_is_free: bool = False,
) -> PolicyChoice:
    """Choose a policy for ``policy: auto``, by simulations of the measured engine under either policy.

    PipeMax runs as ``choose_batching`` says. With ``chunk_is_free``, stock vLLM is simulated with steps of several
    sizes, and the choice says which. ``inputs`` are added to the choice's.
    """
    stock = _fastest_stock(engine, rows, _stock_sizes(engine, chunk_is_free=chunk_is_free))
    least_gain = rows.least_gain(times_are_a_guess=engine.times_are_a_guess)
    plans = batching_plans(engine, rows, batching, mixed_step_tokens)
    runs = _simulated(engine, rows, plans, to_beat=least_gain * rows.rate(stock.result))
    plan = _fastest_plan(rows, runs)
    rates = {ChosenPolicy.PIPEMAX: rows.rate(runs[plan]), ChosenPolicy.VLLM: rows.rate(stock.result)}
    speedup = rates[ChosenPolicy.PIPEMAX] / rates[ChosenPolicy.VLLM]
    chosen, why = verdict(speedup, least_gain)
    if engine.times_are_a_guess:
        why += " (by step times that are a guess)"
    settings: dict[str, int | str] = {}
    if chosen is ChosenPolicy.PIPEMAX:
        settings = plan.settings
    elif stock.engine is not engine:
        settings = {
            "max_num_batched_tokens": stock.engine.max_batched_tokens,
            "max_num_seqs": stock.engine.max_num_seqs,
        }
    return PolicyChoice(
        chosen=chosen,
        reason=f"{why}: simulated {_compared(len(runs), stock.num_sizes)} over {len(rows.workload):,} rows: "
        f"{'at most ' if runs[plan].fell_below else ''}{rates[ChosenPolicy.PIPEMAX]:,.0f} tokens/s for "
        f"{plan.description}"
        f"{'' if engine.wave_groups is None else ' and waves'}{_instead(rows, runs, plan)} "
        f"against {rates[ChosenPolicy.VLLM]:,.0f} for stock vLLM with steps of up to "
        f"{stock.engine.max_batched_tokens:,} tokens, {speedup:.2f}×, in decode batches of "
        f"{runs[plan].mean_decode_batch:.0f} and {stock.result.mean_decode_batch:.0f}",
        predicted_tokens_per_s={str(name): round(value, 3) for name, value in rates.items()},
        inputs={
            **inputs,
            "stages": len(engine.stages),
            "num_batches": engine.num_batches,
            **({} if engine.wave_groups is None else {"wave_groups": engine.wave_groups}),
            "gpu_kv_tokens": engine.capacity.gpu_tokens,
            "host_kv_tokens": engine.capacity.host_blocks * engine.capacity.block_tokens,
            "simulated_rows": len(rows.workload),
            "mean_prompt_tokens": round(float(rows.workload.prompt_tokens.mean()), 1),
            "mean_output_tokens": round(float(rows.workload.output_tokens.mean()), 1),
            "shared_prefix_tokens": rows.workload.shared_prefix_tokens,
            "stock_chunk_tokens": stock.engine.max_batched_tokens,
        },
        settings=settings,
    )


def _instead(rows: Rows, runs: Mapping[BatchingPlan, SimulationResult], plan: BatchingPlan) -> str:
    """Return what PipeMax would make with the other batching, in brackets; nothing if it was not simulated."""
    others = [rows.rate(run) for other, run in runs.items() if other.batching is not plan.batching]
    if not others:
        return ""
    other = "in phases" if plan.batching is Batching.MIXED else "with mixed steps"
    return f" ({max(others):,.0f} {other})"


def _compared(num_plans: int, num_stock: int) -> str:
    """Return how many candidates were compared."""
    ways = "1 way" if num_plans == 1 else f"{num_plans} ways"
    sizes = "1 step size" if num_stock == 1 else f"{num_stock} step sizes"
    return f"{ways} to batch and {sizes} of stock vLLM"


def _stock_sizes(engine: MeasuredEngine, *, chunk_is_free: bool) -> list[int]:
    """Return the sizes of stock vLLM's steps that are open, ascending; the last is the engine's own."""
    smaller = [tokens for tokens in STEP_TOKENS if tokens < engine.max_batched_tokens]
    return [*(smaller if chunk_is_free else []), engine.max_batched_tokens]


@dataclass(frozen=True, slots=True, kw_only=True)
class _StockRun:
    """Stock vLLM's fastest run."""

    engine: MeasuredEngine
    """The engine with its size of a step."""
    result: SimulationResult
    num_sizes: int
    """Sizes that were simulated."""


def _fastest_stock(engine: MeasuredEngine, rows: Rows, sizes: Sequence[int]) -> _StockRun:
    @cache
    def run(tokens: int) -> SimulationResult:
        scenario = rows.scenario(engine.with_steps_of(tokens), grain=rows.stock_grain)
        return ContinuousBatching(scenario, STOCK_VLLM).simulate()

    def rate(tokens: int) -> float:
        return rows.rate(run(tokens))

    own_tokens = engine.max_batched_tokens
    tokens = fastest(sizes, rate)
    # A size other than the engine's own has to be worth it.
    if rate(tokens) < WORTHWHILE_GAIN * rate(own_tokens):
        tokens = own_tokens
    chosen = engine if tokens == own_tokens else engine.with_steps_of(tokens)
    return _StockRun(engine=chosen, result=run(tokens), num_sizes=run.cache_info().currsize)
