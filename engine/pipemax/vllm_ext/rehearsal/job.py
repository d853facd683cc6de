"""Rehearse an engine config on a node that is not there: the settings it names, or the best that it leaves open."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pipemax.config import EngineConfig, Policy
from pipemax.domain.specs import ModelSpec
from pipemax.rehearsal.candidates import (
    Candidate,
    EnginePart,
    best_of_each_family,
    candidates,
    frees_windows,
    simulate_candidate,
)
from pipemax.sim.systems.scenario import Scenario
from pipemax.sim.workloads import Workload
from pipemax.vllm_ext.rehearsal.launch import RehearsedEngine
from pipemax.vllm_ext.rehearsal.run import RehearsalResult, rehearse
from pipemax.vllm_ext.rehearsal.settings import ClockSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsed:
    """One candidate that ran."""

    candidate: Candidate
    simulated_tokens_per_s: float
    """Before the drain, on one engine."""
    result: RehearsalResult


def rehearse_job(
    config: EngineConfig,
    part: EnginePart,
    model: ModelSpec,
    workload: Workload,
    *,
    max_model_len: int,
    host_factor: float = 1.0,
    tell: Callable[[str], None] = lambda line: None,
) -> tuple[list[Rehearsed], list[str]]:
    """Rehearse the fastest candidate of each policy and batching, as the simulator ranks them.

    Return them, the one with the highest steady rate first, and what could not run, with the reason. ``ValueError`` if
    nothing could. ``tell`` is given a line for each candidate simulated and rehearsed.
    """
    not_possible: list[str] = []
    ranked = []
    scenario = Scenario(node=part.node, model=model, workload=workload)
    frees = frees_windows(config, part, model, workload)
    for candidate in candidates(config, part):
        try:
            simulated = simulate_candidate(candidate, part, scenario, frees_windows=frees)
        except ValueError as error:
            not_possible.append(f"{candidate.name}, {candidate.chunk_tokens} tokens a step: {error}")
            continue
        rate = simulated.steady_tokens_per_s
        tell(f"simulated {candidate.name}, {candidate.chunk_tokens} tokens a step: {rate:,.0f} tokens/s")
        ranked.append((candidate, rate))
    rehearsed: list[Rehearsed] = []
    for candidate, rate in best_of_each_family(ranked):
        engine = _engine(candidate, config, part, model, workload, max_model_len, host_factor, frees)
        try:
            result = rehearse(engine, workload)
        except ValueError as error:
            not_possible.append(f"{candidate.name}, {candidate.chunk_tokens} tokens a step: {error}")
            continue
        tell(
            f"rehearsed {candidate.name}, {candidate.chunk_tokens} tokens a step: "
            f"{result.steady_tokens_per_s:,.0f} tokens/s in {result.num_steps:,} steps"
        )
        rehearsed.append(Rehearsed(candidate=candidate, simulated_tokens_per_s=rate, result=result))
    if not rehearsed:
        raise ValueError("; ".join(dict.fromkeys(not_possible)))
    return sorted(rehearsed, key=lambda one: -one.result.steady_tokens_per_s), not_possible


def choose(rehearsed: Sequence[Rehearsed], worthwhile_gain: float) -> Rehearsed:
    """Return the fastest, but stock vLLM unless PipeMax is faster by ``worthwhile_gain`` (1.02: by 2 %)."""
    best = max(rehearsed, key=lambda one: one.result.steady_tokens_per_s)
    stock = next((one for one in rehearsed if one.candidate.policy is Policy.VLLM), None)
    if stock is None or best.result.steady_tokens_per_s >= worthwhile_gain * stock.result.steady_tokens_per_s:
        return best
    return stock


def _engine(
    candidate: Candidate,
    config: EngineConfig,
    part: EnginePart,
    model: ModelSpec,
    workload: Workload,
    max_model_len: int,
    host_factor: float,
    frees_windows: bool,
) -> RehearsedEngine:
    controller, arguments = {}, {}
    if candidate.policy is Policy.PIPEMAX:  # as in the simulator: a sample of the table tells the mean
        controller = {"initial_output_tokens": workload.typical_output_tokens}
        arguments = {"disable_hybrid_kv_cache_manager": False} if frees_windows else {}
    return RehearsedEngine(
        node=part.node,
        model=model,
        parallelism=part.parallelism,
        policy=candidate.policy,
        chunk_tokens=candidate.chunk_tokens,
        max_model_len=max_model_len,
        max_num_seqs=candidate.max_num_seqs,
        batching=candidate.batching,
        num_batches=config.num_batches,
        clock=ClockSettings(host_factor=host_factor),
        checks_kv=False,
        controller=controller,
        vllm=arguments,
    )
