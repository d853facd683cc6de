"""Calls from the engine's process to all stages' workers, by vLLM's ``collective_rpc``. Only plain values cross.

The engine must be idle: they touch the pools.
"""

from typing import Any

from pipemax.transfer.checks.copy_check import CopyCheck
from pipemax.vllm_ext.seam.vllm_types import LLMEngine, get_kv_transfer_group
from pipemax.vllm_ext.worker.connector import PipeMaxConnector


class AnswersCopyCalls:
    """What a worker with PipeMax's connector answers."""

    def pipemax_check_copies(self) -> dict[str, Any]:
        return _connector().check_copies().to_values()

    def pipemax_poison_prefetches(self, is_on: bool) -> None:
        _connector().poison_prefetches(is_on)

    def pipemax_swap_prefetches(self, is_on: bool) -> None:
        _connector().swap_prefetches(is_on)


def check_copies(engine: LLMEngine) -> list[CopyCheck]:
    """Check every worker's copies with known bytes; what the pools held is lost."""
    answers = engine.collective_rpc(AnswersCopyCalls.pipemax_check_copies.__name__)
    return [CopyCheck(**values) for values in answers]


def poison_prefetches(engine: LLMEngine, *, is_on: bool) -> None:
    """Have every worker overwrite the targets of its prefetches before the copies, or no longer."""
    engine.collective_rpc(AnswersCopyCalls.pipemax_poison_prefetches.__name__, args=(is_on,))


def swap_prefetches(engine: LLMEngine, *, is_on: bool) -> None:
    """Have every worker prefetch wrong blocks, or no longer: what a comparison of tokens must see."""
    engine.collective_rpc(AnswersCopyCalls.pipemax_swap_prefetches.__name__, args=(is_on,))


def _connector() -> PipeMaxConnector:
    connector = get_kv_transfer_group()
    assert isinstance(connector, PipeMaxConnector), connector
    return connector
