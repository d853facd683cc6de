"""How many GPUs an engine takes: pipeline stages × GPUs that share a stage, checked against those that there are."""

import os

from pipemax.config import EngineConfig


def pipeline_parallel_size(config: EngineConfig, *, num_gpus: int) -> int:
    """The stages to run: as asked, else one for each group of ``tensor_parallel_size`` GPUs.

    ``num_gpus`` is 0 on a machine without any, where stages are processes that share its cores. ``ValueError`` where
    there are fewer GPUs than needed.
    """
    if num_gpus == 0:
        if config.tensor_parallel_size > 1:
            raise ValueError(
                f"tensor_parallel_size {config.tensor_parallel_size} needs GPUs, and this machine shows none"
            )
        return config.pipeline_parallel_size or 1
    num_stages = config.pipeline_parallel_size or max(1, num_gpus // config.tensor_parallel_size)
    needed = num_stages * config.tensor_parallel_size
    if needed > num_gpus:
        shown = os.environ.get("CUDA_VISIBLE_DEVICES", "not set: all of the machine's")
        raise ValueError(
            f"pipeline_parallel_size {num_stages} × tensor_parallel_size {config.tensor_parallel_size} needs {needed} "
            f"GPUs, and this executor has {num_gpus} (CUDA_VISIBLE_DEVICES={shown}): lower one of the two, or give "
            f"each executor {needed} GPUs (spark.executor.resource.gpu.amount)"
        )
    return num_stages
