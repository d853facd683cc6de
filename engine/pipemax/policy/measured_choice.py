"""Chooses how an engine whose steps were measured should run: by simulations of the engine itself.

Candidates are PipeMax with separated and with mixed batching, and stock vLLM, the latter two with steps of several
sizes. The sizes of mixed steps come from the calibration: the ends of its segments, where one more token costs most,
and the sizes between. Pure: nothing is known of running engines.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from pipemax.config import BatchingChoice
from pipemax.domain.plan import Batching
from pipemax.policy.compare import WORTHWHILE_GAIN, ChosenPolicy, PolicyChoice, verdict
from pipemax.policy.race import race
from pipemax.sim.measured_engine import MeasuredEngine
from pipemax.sim.result import SimulationResult
from pipemax.sim.systems.catalog import simulate
from pipemax.sim.systems.pipemax import PipeMaxSystem
from pipemax.sim.systems.pipemax_config import PipeMaxOptions, mixed_batching
from pipemax.sim.systems.scenario import Scenario, measured_scenario
from pipemax.sim.workloads import Workload

STEP_TOKENS = (128, 256, 512, 1024, 2048, 4096, 8192)
"""Sizes of a step that are simulated, next to the engine's own."""
_LEAST_STEP_RATIO = 1.25
"""Of two sizes of mixed steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchingPlan:
    """How PipeMax should batch, and what was simulated for it."""

    batching: Batching
    mixed_step_tokens: int | None = None
    """Maximum tokens of a step with mixed batching, None with separated."""
    tokens_per_s: float
    """Simulated, of prompts and outputs."""
    mean_decode_batch: float
    other_tokens_per_s: float | None = None
    """Of the best candidate with the other batching; None if it was not to be considered."""
    num_candidates: int = 1
    """Ways to batch that were compared."""

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

    def scenario(self, engine: MeasuredEngine) -> Scenario:
        """Return what is simulated of them."""
        return measured_scenario(engine, self.workload, stops_at_drain=not self.is_whole_table)

    def rate(self, result: SimulationResult) -> float:
        """Return the tokens/s that count."""
        return result.total_tokens_per_s if self.is_whole_table else result.steady_tokens_per_s


def choose_batching(
    engine: MeasuredEngine, rows: Rows, batching: BatchingChoice, mixed_step_tokens: int | None = None
) -> BatchingPlan:
    """Return the fastest of what ``batching`` and ``mixed_step_tokens``, both of the engine config, leave open."""
    sizes: list[int] = []
    if batching is not BatchingChoice.SEPARATED:
        sizes = mixed_sizes(engine) if mixed_step_tokens is None else [mixed_step_tokens]
    mixed = {size: _pipemax(engine, rows, size) for size in sizes}
    left = race(mixed)
    plans = [_plan(rows, size, mixed[size].simulate()) for size in left]
    if batching is not BatchingChoice.MIXED:
        plans.append(_plan(rows, None, _pipemax(engine, rows, None).simulate()))
    best = max(plans, key=lambda plan: plan.tokens_per_s)
    others = [plan.tokens_per_s for plan in plans if plan.batching is not best.batching]
    num_candidates = len(sizes) + len(plans) - len(left)
    return replace(best, other_tokens_per_s=max(others, default=None), num_candidates=num_candidates)


def _pipemax(engine: MeasuredEngine, rows: Rows, mixed_step_tokens: int | None) -> PipeMaxSystem:
    controller = {} if mixed_step_tokens is None else mixed_batching(mixed_step_tokens)
    return PipeMaxSystem(rows.scenario(engine), PipeMaxOptions(controller=controller))


def _plan(rows: Rows, mixed_step_tokens: int | None, result: SimulationResult) -> BatchingPlan:
    return BatchingPlan(
        batching=Batching.SEPARATED if mixed_step_tokens is None else Batching.MIXED,
        mixed_step_tokens=mixed_step_tokens,
        tokens_per_s=rows.rate(result),
        mean_decode_batch=result.mean_decode_batch,
    )


def mixed_sizes(engine: MeasuredEngine) -> list[int]:
    """Return the sizes of mixed steps to simulate, ascending: those at which a token costs less than at any smaller.

    Of sizes that are all but equal only the largest is there: two of them would take two places in the race.
    """
    ends = {
        segment.min_size - 1
        for stage in engine.stages
        for times in (stage.decode_time, stage.prefill_time)
        for segment in times.segments
    }
    most_tokens = engine.max_batched_tokens
    sizes = sorted(
        {size for size in {*STEP_TOKENS, *ends} if STEP_TOKENS[0] <= size < most_tokens} | {most_tokens}
    )
    chosen: list[int] = []
    least_s = math.inf
    for size in sizes:
        token_s = max(stage.prefill_time.batch_s(size) for stage in engine.stages) / size
        if token_s < least_s:
            chosen.append(size)
            least_s = token_s
    larger = [*chosen[1:], math.inf]
    return [size for size, after in zip(chosen, larger, strict=True) if after >= _LEAST_STEP_RATIO * size]


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
    pipemax = choose_batching(engine, rows, batching, mixed_step_tokens)
    stock_tokens = _stock_sizes(engine, chunk_is_free=chunk_is_free)
    stock_engine, stock = _fastest_stock(engine, rows, stock_tokens)
    rates = {ChosenPolicy.PIPEMAX: pipemax.tokens_per_s, ChosenPolicy.VLLM: rows.rate(stock)}
    speedup = rates[ChosenPolicy.PIPEMAX] / rates[ChosenPolicy.VLLM]
    chosen, why = verdict(speedup)
    settings: dict[str, int | str] = {}
    if chosen is ChosenPolicy.PIPEMAX:
        settings = pipemax.settings
    elif stock_engine is not engine:
        settings = {
            "max_num_batched_tokens": stock_engine.max_batched_tokens,
            "max_num_seqs": stock_engine.max_num_seqs,
        }
    return PolicyChoice(
        chosen=chosen,
        reason=f"{why}: simulated {_compared(pipemax, len(stock_tokens))} over {len(rows.workload):,} rows: "
        f"{pipemax.tokens_per_s:,.0f} tokens/s for {pipemax.description}{_instead(pipemax)} "
        f"against {rates[ChosenPolicy.VLLM]:,.0f} for stock vLLM with steps of up to "
        f"{stock_engine.max_batched_tokens:,} tokens, {speedup:.2f}×, in decode batches of "
        f"{pipemax.mean_decode_batch:.0f} and {stock.mean_decode_batch:.0f}",
        predicted_tokens_per_s={str(name): round(value, 3) for name, value in rates.items()},
        inputs={
            **inputs,
            "stages": len(engine.stages),
            "num_batches": engine.num_batches,
            "gpu_kv_tokens": engine.capacity.gpu_tokens,
            "host_kv_tokens": engine.capacity.host_blocks * engine.capacity.block_tokens,
            "simulated_rows": len(rows.workload),
            "mean_prompt_tokens": round(float(rows.workload.prompt_tokens.mean()), 1),
            "mean_output_tokens": round(float(rows.workload.output_tokens.mean()), 1),
            "shared_prefix_tokens": rows.workload.shared_prefix_tokens,
            "stock_chunk_tokens": stock_engine.max_batched_tokens,
        },
        settings=settings,
    )


def _instead(plan: BatchingPlan) -> str:
    """Return what PipeMax would make with the other batching, in brackets; nothing where the config excludes it."""
    if plan.other_tokens_per_s is None:
        return ""
    other = "in phases" if plan.batching is Batching.MIXED else "with mixed steps"
    return f" ({plan.other_tokens_per_s:,.0f} {other})"


def _compared(plan: BatchingPlan, num_stock: int) -> str:
    """Return how many candidates were compared."""
    ways = "1 way" if plan.num_candidates == 1 else f"{plan.num_candidates} ways"
    sizes = "1 step size" if num_stock == 1 else f"{num_stock} step sizes"
    return f"{ways} to batch and {sizes} of stock vLLM"


def _stock_sizes(engine: MeasuredEngine, *, chunk_is_free: bool) -> list[int]:
    """Return the sizes of stock vLLM's steps to simulate, ascending; the last is the engine's own."""
    smaller = [tokens for tokens in STEP_TOKENS if tokens < engine.max_batched_tokens]
    return [*(smaller if chunk_is_free else []), engine.max_batched_tokens]


def _fastest_stock(
    engine: MeasuredEngine, rows: Rows, sizes: Sequence[int]
) -> tuple[MeasuredEngine, SimulationResult]:
    """Return stock vLLM's run, and the engine with its size of a step."""
    runs = {tokens: simulate("vllm_032_pp", rows.scenario(engine.with_steps_of(tokens))) for tokens in sizes}
    own = runs[engine.max_batched_tokens]
    fastest_tokens = max(runs, key=lambda tokens: rows.rate(runs[tokens]))
    # A size other than the engine's own has to be worth it.
    if rows.rate(runs[fastest_tokens]) >= rows.rate(own) * WORTHWHILE_GAIN:
        return engine.with_steps_of(fastest_tokens), runs[fastest_tokens]
    return engine, own
