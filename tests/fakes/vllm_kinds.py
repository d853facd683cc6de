"""The kinds of vLLM engine that a CPU does not run by itself: asynchronous scheduling and the V2 model runner."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

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


def restrict_sampling_by_pytorch(worker: Any) -> None:
    """Called on each worker of the V2 runner: Triton's interpreter fails at vLLM's kernel for top_k and top_p, so
    vLLM's own PyTorch code takes its place.
    """
    from vllm.v1.sample.ops import topk_topp_sampler

    topk_topp_sampler.HAS_TRITON = False
