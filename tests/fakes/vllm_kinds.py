"""The kinds of vLLM engine that a CPU does not run by itself: asynchronous scheduling and the V2 model runner."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from vllm.config import VllmConfig
from vllm.config import vllm as vllm_config_module
from vllm.platforms.cpu import CpuPlatform

_INTERPRETED_TRITON = Path(__file__).parent / "interpreted_triton"


@contextmanager
def asynchronous_scheduling_on_cpu() -> Iterator[None]:
    """While it lasts, configs made in this process keep what vLLM decided before the CPU platform, which turns
    asynchronous scheduling off after everything else.
    """
    turn_off = CpuPlatform.check_and_update_config

    def check_and_update_config(vllm_config: VllmConfig) -> None:
        decided = vllm_config.scheduler_config.async_scheduling
        turn_off(vllm_config)
        vllm_config.scheduler_config.async_scheduling = decided

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CpuPlatform, "check_and_update_config", staticmethod(check_and_update_config))
        yield


@contextmanager
def runner_version(version: int) -> Iterator[None]:
    """Configs and engines made meanwhile have vLLM's model runner of this version; with V2, the engine's own
    processes interpret its kernels.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_USE_V2_MODEL_RUNNER", str(version - 1))
        if version == 2:
            patch.setattr(vllm_config_module, "HAS_TRITON", True)
            patch.setenv("TRITON_INTERPRET", "1")
            patch.setenv("PYTHONPATH", str(_INTERPRETED_TRITON), prepend=os.pathsep)
        yield
