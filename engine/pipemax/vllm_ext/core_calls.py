"""Call the scheduler in vLLM's core from the engine's process, by typed functions. Only plain values cross."""

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

from pipemax.config import EngineConfig
from pipemax.control.controller_config import StageConfig
from pipemax.control.times.profiling import Profile
from pipemax.domain.plain_values import decode, encode
from pipemax.domain.plan import Batching
from pipemax.domain.step_records import StepLimits, StepRecords
from pipemax.vllm_ext.seam.core_client import call_scheduler, hold_requests, send_to_scheduler
from pipemax.vllm_ext.seam.vllm_types import LLMEngine


def take_profile(engine: LLMEngine) -> Profile:
    """Return the steps and copies that were timed since the last call."""
    profile: Profile = decode(Profile, call_scheduler(engine, "take_profile"))
    return profile


def recalibrate(engine: LLMEngine, stages: tuple[StageConfig, ...]) -> None:
    """Have the controller predict by these coefficients from now on."""
    call_scheduler(engine, "recalibrate", encode(stages))


def resize_gpu(engine: LLMEngine, gpu_blocks: int | None) -> None:
    """Have an idle engine use this many of its GPU's KV blocks, ``None`` for all, and forget all prefixes.

    The core's error if there are fewer blocks.
    """
    call_scheduler(engine, "resize_gpu", gpu_blocks, when_idle=True)


def use_batching(engine: LLMEngine, batching: Batching, mixed_step_tokens: int | None = None) -> None:
    """Have an idle engine plan by this batching, mixed steps up to so many tokens, None for vLLM's maximum.

    The core's error if it has requests, or its steps cannot be so large.
    """
    call_scheduler(engine, "use_batching", batching.value, mixed_step_tokens, when_idle=True)


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
    hold_requests(engine, True)
    try:
        yield
    finally:
        hold_requests(engine, False)


@contextmanager
def fixed_times(engine: LLMEngine) -> Iterator[None]:
    """Have the estimates of step times stay as they are meanwhile.

    Steps then depend on the requests only: the same requests, held until all are there, take the same steps again.
    """
    call_scheduler(engine, "learn_times", False)
    try:
        yield
    finally:
        call_scheduler(engine, "learn_times", True)


def copy_counts(engine: LLMEngine) -> dict[str, float]:
    """Return the evictions, prefetches and prefetched blocks since the last resize.

    And ``stall_s``, the time that steps waited for copies since the engine's start, on the stage where it is most.
    """
    counts: dict[str, float] = call_scheduler(engine, "copy_counts")
    return counts


def set_input_open(engine: LLMEngine, is_open: bool) -> None:
    """Tell the scheduler whether more requests may come, in order with ``add_request``.

    Return without waiting for the core, which may be computing a step. Call this on the thread that adds requests.
    If the core is dead, do nothing: the next ``engine.step()`` reports the death, as after ``abort_requests``.
    """
    send_to_scheduler(engine, "set_input_open", is_open)


def most_limits(engine: LLMEngine) -> StepLimits:
    """Return the limits that a tunable scheduler of stock vLLM began with."""
    step_tokens, running_rows = call_scheduler(engine, "most_limits")
    return StepLimits(step_tokens=step_tokens, running_rows=running_rows)


def set_limits(engine: LLMEngine, limits: StepLimits) -> None:
    """Have a tunable scheduler schedule by these limits from its next step on. Return without waiting for the core.

    They are not above ``most_limits``. Steps below what some row must compute at once, such as a whole prompt where
    prompts are not split, have room for that much. Call this on the thread that adds requests.
    """
    send_to_scheduler(engine, "set_limits", limits.step_tokens, limits.running_rows)


def ask_step_records(engine: LLMEngine, take: Callable[[StepRecords], None]) -> None:
    """Ask a tunable scheduler for its steps since it was last asked. Return without waiting for the core.

    ``take`` is called with them, on another thread. Call this on the thread that adds requests.
    """

    def hear(answer: Future[Any]) -> None:
        if answer.exception() is None:
            take(StepRecords.from_plain(answer.result()))

    answer = send_to_scheduler(engine, "take_step_records")
    if answer is not None:
        answer.add_done_callback(hear)
