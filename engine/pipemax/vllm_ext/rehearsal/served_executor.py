"""The executor of a virtual node in vLLM's own core process, whose config vLLM would fit to this machine once more."""

import os

from vllm.config import VllmConfig
from vllm.envs import disable_envs_cache

from pipemax.vllm_ext.rehearsal.executor import VirtualNodeExecutor


class ServedNodeExecutor(VirtualNodeExecutor):
    """Sets for the whole core process what a GPU's would have; the process ends with the engine.

    It is made before the scheduler and the queue of steps in flight take their settings from the config. When the core
    has started, vLLM fits the config to the machine again: on a CPU it would turn asynchronous scheduling off below a
    scheduler that has begun with it, and refuse the V2 runner for want of Triton.
    """

    def _init_executor(self) -> None:
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"
        disable_envs_cache()
        self.vllm_config.scheduler_config.async_scheduling = True
        setattr(VllmConfig, "__post_init__", _keep)  # noqa: B010  # not a method that mypy lets be replaced
        super()._init_executor()

    def reset_mm_cache(self) -> None:
        pass


def _keep(vllm_config: VllmConfig) -> None:
    pass
