"""Give an engine of stock vLLM a scheduler whose limits may change while it runs, where this vLLM can have one."""

import logging
from functools import cache

from pipemax.vllm_ext.seam.version import installed_lacks_for_tuning
from pipemax.vllm_ext.seam.vllm_types import VLLM_VERSION, VllmConfig

log = logging.getLogger(__name__)

_MODULE = "pipemax.vllm_ext.scheduler.tunable"


def fit_tunable_scheduler(vllm_config: VllmConfig) -> None:
    """Set our scheduler over the one of vLLM's two that the config and the platform lead to.

    Leave vLLM's own where it has another for this model or the user names one, and where it lacks what we rely on.
    """
    if lacking := installed_lacks_for_tuning():
        _say_fixed(lacking)
        return
    scheduler, parallel = vllm_config.scheduler_config, vllm_config.parallel_config
    is_one_engine = vllm_config.model_config.runner_type == "generate" and parallel.data_parallel_size == 1
    if scheduler.scheduler_cls is None and is_one_engine:
        name = "TunableAsyncScheduler" if scheduler.async_scheduling else "TunableScheduler"
        scheduler.scheduler_cls = f"{_MODULE}.{name}"


def has_tunable_scheduler(vllm_config: VllmConfig) -> bool:
    """Return whether the limits of an engine of this config may change while it runs."""
    name = vllm_config.scheduler_config.scheduler_cls
    return isinstance(name, str) and name.startswith(f"{_MODULE}.")


@cache
def _say_fixed(lacking: tuple[str, ...]) -> None:
    log.warning(
        "vLLM %s runs with the limits that it starts with: changing them while it runs needs %s",
        VLLM_VERSION,
        ", ".join(lacking),
    )
