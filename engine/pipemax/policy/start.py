"""Starts an engine from a config, and decides ``policy: auto`` once for the engine's life.

What cannot run under PipeMax, or cannot gain by it, needs no measuring. Otherwise an engine under PipeMax is started,
which measures itself if nothing is known of it, and simulations of the measured engine decide. If they choose stock
vLLM, the engine is started again. What was measured is kept, but only an engine tells how many KV blocks a GPU holds.
"""

import logging
from dataclasses import dataclass, replace

from pipemax.config import BatchingChoice, EngineConfig, Policy
from pipemax.domain.errors import EngineStartError
from pipemax.policy.compare import ChosenPolicy, PolicyChoice
from pipemax.policy.row_sample import choose_batching_for, choose_policy
from pipemax.sim.measured_engine import MeasuredEngine
from pipemax.vllm_ext.engine.pooling_engine import PoolingEngine
from pipemax.vllm_ext.engine.vllm_engine import VllmEngine
from pipemax.vllm_ext.launch.forecast import forecast

log = logging.getLogger(__name__)

_ONE_STAGE = "with one pipeline stage no batch waits whose GPU memory PipeMax could give to another"


@dataclass(frozen=True, slots=True, kw_only=True)
class StartedEngine:
    """A running engine, and why it has its policy."""

    engine: VllmEngine
    choice: PolicyChoice


def start_engine(config: EngineConfig) -> StartedEngine:
    """Start an engine, and block until its model is loaded. ``EngineStartError`` says why it could not be loaded."""
    if config.is_pooling:
        return _start_pooling(config)
    match config.policy:
        case Policy.AUTO:
            started = _start_by_simulation(config)
        case Policy.PIPEMAX:
            started = _start_pipemax(config)
        case Policy.VLLM:
            choice = PolicyChoice(chosen=ChosenPolicy.VLLM, reason="the engine config says so")
            started = StartedEngine(engine=VllmEngine(config), choice=choice)
    log.info("policy %s: %s", started.choice.chosen, started.choice.reason)
    return started


def _start_pooling(config: EngineConfig) -> StartedEngine:
    reason = f"task {config.task} generates no tokens, so there is nothing that PipeMax could schedule"
    stock = config.model_copy(update={"policy": Policy.VLLM})
    log.info("policy vllm: %s", reason)
    return StartedEngine(
        engine=PoolingEngine(stock), choice=PolicyChoice(chosen=ChosenPolicy.VLLM, reason=reason)
    )


def _start_pipemax(config: EngineConfig) -> StartedEngine:
    """Start PipeMax, and settle what the config leaves open of its batching, if the engine is measured."""
    engine = VllmEngine(config)
    choice = PolicyChoice(chosen=ChosenPolicy.PIPEMAX, reason="the engine config says so")
    if engine.measured is None:
        return StartedEngine(engine=engine, choice=choice)
    plan = choose_batching_for(engine.measured, config.row_lengths, config.batching, config.mixed_step_tokens)
    if plan is None:
        return StartedEngine(engine=engine, choice=choice)
    engine.use_batching(plan.batching, plan.mixed_step_tokens)
    reason = f"{choice.reason}; {plan.description}"
    return StartedEngine(engine=engine, choice=replace(choice, reason=reason, settings=plan.settings))


def _start_by_simulation(config: EngineConfig) -> StartedEngine:
    pipemax = config.model_copy(update={"policy": Policy.PIPEMAX})
    expected = forecast(pipemax)
    if expected.refusal:
        return _start_stock(config, expected.refusal)
    if expected.num_stages == 1:
        return _start_stock(config, _ONE_STAGE)
    if expected.engine is not None:
        return _start(config, _choose(expected.engine, config))
    engine = _start_checked(pipemax)
    if isinstance(engine, str):
        return _start_stock(config, engine)
    if engine.measured is None:
        engine.close()
        return _start_stock(config, "step times were not measured, so that nothing could be simulated")
    choice = _choose(engine.measured, config)
    if choice.chosen is ChosenPolicy.PIPEMAX:
        settled = config.model_copy(update=choice.settings)
        engine.use_batching(BatchingChoice(settled.batching).at_start, settled.mixed_step_tokens)
        return StartedEngine(engine=engine, choice=choice)
    log.info("stock vLLM is chosen, so the engine is started again: %s", choice.reason)
    engine.close()
    return _start(config, choice)


def _choose(engine: MeasuredEngine, config: EngineConfig) -> PolicyChoice:
    if config.vllm_arguments.get("disable_hybrid_kv_cache_manager"):  # then stock vLLM keeps whole KV too
        engine = replace(engine, windowed_capacity=None)
    return choose_policy(
        engine,
        config.row_lengths,
        batching=config.batching,
        mixed_step_tokens=config.mixed_step_tokens,
        chunk_is_free=config.max_num_batched_tokens is None,
    )


def _start_checked(pipemax: EngineConfig) -> VllmEngine | str:
    """Return an engine under PipeMax, or why ``auto`` takes stock vLLM in its place."""
    try:
        engine = VllmEngine(pipemax)
    except EngineStartError as error:
        # If the model itself is the cause, stock vLLM will fail with it too.
        return f"an engine under PipeMax did not start ({error})"
    if engine.check is not None and (doubt := engine.check.auto_refusal()):
        engine.close()
        return doubt
    return engine


def _start_stock(config: EngineConfig, reason: str) -> StartedEngine:
    return _start(config, PolicyChoice(chosen=ChosenPolicy.VLLM, reason=reason))


def _start(config: EngineConfig, choice: PolicyChoice) -> StartedEngine:
    settled = EngineConfig.parse({**config.model_dump(), "policy": choice.chosen.value, **choice.settings})
    if choice.chosen is ChosenPolicy.VLLM:
        return StartedEngine(engine=VllmEngine(settled), choice=choice)
    engine = _start_checked(settled)
    if isinstance(engine, str):
        return _start_stock(config, engine)
    return StartedEngine(engine=engine, choice=choice)
