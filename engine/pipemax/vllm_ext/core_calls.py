"""Call the scheduler in vLLM's core from the engine's process, through vLLM's own utility calls.

vLLM looks up the method of such a call by its name on ``EngineCore``, and passes nothing on to the scheduler. So the
core gets some more methods, in the process where PipeMax's scheduler is made. Only plain values cross. The core may
also live in the caller's process (``VLLM_ENABLE_V1_MULTIPROCESSING=0``), where the methods are called directly.
"""

import logging
import uuid
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine import EngineCoreRequestType
from vllm.v1.engine.core import EngineCore
from vllm.v1.engine.core_client import InprocClient
from vllm.v1.engine.llm_engine import LLMEngine

from pipemax.config import EngineConfig
from pipemax.control.controller_config import StageConfig
from pipemax.control.decision_trace import decode, encode
from pipemax.control.times.profiling import Profile, TimedCopy, TimedMixedStep, TimedStep
from pipemax.domain.plan import Batching
from pipemax.vllm_ext.runtime_settings import encode_stage

log = logging.getLogger(__name__)

_TAKE_PROFILE = "pipemax_take_profile"
_RECALIBRATE = "pipemax_recalibrate"
_RESIZE_GPU = "pipemax_resize_gpu"
_USE_BATCHING = "pipemax_use_batching"
_COPY_COUNTS = "pipemax_copy_counts"
_SET_INPUT_OPEN = "pipemax_set_input_open"
_HOLD_REQUESTS = "pipemax_hold_requests"
_LEARN_TIMES = "pipemax_learn_times"


def answer_calls() -> None:
    """Hand calls on to the core's scheduler. Call this in the core's process."""
    setattr(EngineCore, _TAKE_PROFILE, lambda core: core.scheduler.take_profile())
    setattr(EngineCore, _RECALIBRATE, lambda core, stages: core.scheduler.recalibrate(stages))
    setattr(EngineCore, _RESIZE_GPU, _resize_gpu)
    setattr(EngineCore, _USE_BATCHING, _use_batching)
    setattr(EngineCore, _COPY_COUNTS, lambda core: core.scheduler.copy_counts())
    setattr(EngineCore, _SET_INPUT_OPEN, lambda core, is_open: core.scheduler.set_input_open(is_open))
    setattr(EngineCore, _HOLD_REQUESTS, _hold_requests)
    setattr(EngineCore, _LEARN_TIMES, lambda core, is_on: core.scheduler.learn_times(is_on))


def encode_profile(profile: Profile) -> dict[str, Any]:
    """Encode timed steps and copies as plain values, which ``take_profile`` decodes."""
    return {name: [encode(timed) for timed in kind] for name, kind in profile._asdict().items()}


def take_profile(engine: LLMEngine) -> Profile:
    """Return the steps and copies that were timed since the last call."""
    profile = _call(engine, _TAKE_PROFILE)
    return Profile(
        steps=[decode(TimedStep, step) for step in profile["steps"]],
        mixed_steps=[decode(TimedMixedStep, step) for step in profile["mixed_steps"]],
        copies=[decode(TimedCopy, copy) for copy in profile["copies"]],
    )


def recalibrate(engine: LLMEngine, stages: tuple[StageConfig, ...]) -> None:
    """Have the controller predict by these coefficients from now on."""
    _call(engine, _RECALIBRATE, [encode_stage(stage) for stage in stages])


def resize_gpu(engine: LLMEngine, gpu_blocks: int | None) -> None:
    """Have an idle engine use this many of its GPU's KV blocks, ``None`` for all, and forget all prefixes.

    The core's error if there are fewer blocks.
    """
    _call(engine, _RESIZE_GPU, gpu_blocks)


def use_batching(engine: LLMEngine, batching: Batching, mixed_step_tokens: int | None = None) -> None:
    """Have an idle engine plan by this batching, mixed steps up to so many tokens, None for vLLM's maximum.

    The core's error if it has requests, or its steps cannot be so large.
    """
    _call(engine, _USE_BATCHING, batching.value, mixed_step_tokens)


@contextmanager
def separated(engine: LLMEngine, config: EngineConfig) -> Iterator[None]:
    """Separate prefill and decode for a while in an engine of this config, which is idle before and after."""
    begins_with = config.batching.at_start
    if begins_with is Batching.SEPARATED:
        yield
        return
    use_batching(engine, Batching.SEPARATED)
    try:
        yield
    finally:
        use_batching(engine, begins_with, config.mixed_step_tokens)


@contextmanager
def held(engine: LLMEngine) -> Iterator[None]:
    """Have an idle engine begin no request meanwhile, so that all that are added begin together."""
    _call(engine, _HOLD_REQUESTS, True)
    try:
        yield
    finally:
        _call(engine, _HOLD_REQUESTS, False)


@contextmanager
def fixed_times(engine: LLMEngine) -> Iterator[None]:
    """Have the estimates of step times stay as they are meanwhile.

    Steps then depend on the requests only: the same requests, held until all are there, take the same steps again.
    """
    _call(engine, _LEARN_TIMES, False)
    try:
        yield
    finally:
        _call(engine, _LEARN_TIMES, True)


def copy_counts(engine: LLMEngine) -> dict[str, float]:
    """Return the evictions, prefetches and prefetched blocks since the last resize.

    And ``stall_s``, the time that steps waited for copies since the engine's start, on the stage where it is most.
    """
    counts: dict[str, float] = _call(engine, _COPY_COUNTS)
    return counts


def _resize_gpu(core: EngineCore, gpu_blocks: int | None) -> None:
    _idle_scheduler(core).resize_gpu(gpu_blocks)


def _use_batching(core: EngineCore, batching: str, mixed_step_tokens: int | None) -> None:
    _idle_scheduler(core).use_batching(batching, mixed_step_tokens)


def _idle_scheduler(core: EngineCore) -> Any:
    """Return the scheduler once nothing is in flight: the last request may have ended while further steps were."""
    while core.batch_queue:
        core.step_fn()
    return core.scheduler


def _hold_requests(core: EngineCore, is_on: bool) -> None:
    if is_on:
        scheduler = _idle_scheduler(core)
        while scheduler.has_requests():  # that have ended, of which the workers have not been told
            core.step_fn()
            _idle_scheduler(core)
    core.scheduler.set_pause_state(PauseState.PAUSED_ALL if is_on else PauseState.UNPAUSED)


def set_input_open(engine: LLMEngine, is_open: bool) -> None:
    """Tell the scheduler whether more requests may come, in order with ``add_request``.

    Return without waiting for the core, which may be computing a step. Call this on the thread that adds requests.
    If the core is dead, do nothing: the next ``engine.step()`` reports the death, as after ``abort_requests``.
    """
    _send(engine, _SET_INPUT_OPEN, is_open)


def _call(engine: LLMEngine, method: str, *arguments: object) -> Any:
    """Return the core's answer. A core in another process answers between two steps."""
    client: Any = engine.engine_core  # the clients' base class in vLLM lacks the method that each client has
    if isinstance(client, InprocClient):
        return getattr(client.engine_core, method)(*arguments)
    return client.call_utility(method, *arguments)


def _send(engine: LLMEngine, method: str, *arguments: object) -> None:
    """Make a call and do not wait for the answer: vLLM's ``call_utility`` without its last line.

    The order holds: requests, aborts and calls take one socket and one queue, and the core empties the queue in order
    before each step. A failed call is logged here and in the core.
    """
    client: Any = engine.engine_core
    if isinstance(client, InprocClient):
        getattr(client.engine_core, method)(*arguments)
    elif not client.resources.engine_dead:
        call_id = uuid.uuid1().int >> 64
        answer: Future[Any] = Future()
        answer.add_done_callback(_log_failure)
        # Before the call is sent: vLLM's output thread looks up the answer's id, and dies if it cannot find it.
        client.utility_results[call_id] = answer
        client._send_input(EngineCoreRequestType.UTILITY, (0, call_id, method, arguments))


def _log_failure(answer: Future[Any]) -> None:
    error = answer.exception()
    if error is not None:
        log.error("vLLM's core did not carry out a call: %s", error)
