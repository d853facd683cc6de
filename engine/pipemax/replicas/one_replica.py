"""Measure one replica by itself: all are equal, so what is measured of the first holds for all."""

import os

from pipemax.config import EngineConfig
from pipemax.replicas.division import divide
from pipemax.replicas.hardware import read_hardware


def as_first_replica(config: EngineConfig) -> EngineConfig:
    """Take the place of the first replica: return its config, and leave this process its GPUs and cores only.

    Call this before vLLM is imported. Nothing changes for a config without replicas. ``ValueError`` if there are
    fewer GPUs than all replicas need.
    """
    if config.num_replicas == 1:
        return config
    share = divide(config, read_hardware())[0]
    os.sched_setaffinity(0, share.cores)
    if share.gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(share.gpus)
    return share.config
