"""Calls from the engine's process to the scheduler in vLLM's core process, by vLLM's own utility calls.

vLLM finds the method of such a call by its name on ``EngineCore``, and passes nothing on to the scheduler: so the core
gets two methods more, in the process where PipeMax's scheduler is made. Plain values alone cross.
"""

from typing import Any

from vllm.v1.engine.core import EngineCore
from vllm.v1.engine.llm_engine import LLMEngine

from pipemax.control.controller_config import StageConfig
from pipemax.control.decision_trace import decode, encode
from pipemax.control.times.profiling import TimedCopy, TimedStep
from pipemax.vllm_ext.runtime_settings import encode_stage

_TAKE_PROFILE = "pipemax_take_profile"
_RECALIBRATE = "pipemax_recalibrate"


def answer_calls() -> None:
    """In the core's process: hand calls on to its scheduler."""
    setattr(EngineCore, _TAKE_PROFILE, lambda core: core.scheduler.take_profile())
    setattr(EngineCore, _RECALIBRATE, lambda core, stages: core.scheduler.recalibrate(stages))


def encode_profile(steps: list[TimedStep], copies: list[TimedCopy]) -> dict[str, Any]:
    return {"steps": [encode(step) for step in steps], "copies": [encode(copy) for copy in copies]}


def take_profile(engine: LLMEngine) -> tuple[list[TimedStep], list[TimedCopy]]:
    """Steps and copies that were timed since the last call."""
    profile = _call(engine, _TAKE_PROFILE)
    steps = [decode(TimedStep, step) for step in profile["steps"]]
    return steps, [decode(TimedCopy, copy) for copy in profile["copies"]]


def recalibrate(engine: LLMEngine, stages: tuple[StageConfig, ...]) -> None:
    """The controller predicts by these coefficients from now on."""
    _call(engine, _RECALIBRATE, [encode_stage(stage) for stage in stages])


def _call(engine: LLMEngine, method: str, *arguments: object) -> Any:
    client: Any = engine.engine_core  # vLLM's base class of clients lacks the method that each of them has
    return client.call_utility(method, *arguments)
