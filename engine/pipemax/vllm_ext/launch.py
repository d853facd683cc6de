"""From an EngineConfig to a running vLLM engine: which arguments and which environment."""

import os
from typing import Any

import vllm
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform

from pipemax.config import EngineConfig
from pipemax.domain.units import GIB


def engine_args(config: EngineConfig) -> EngineArgs:
    """vLLM's arguments. ``ValueError`` where the config does not fit this machine or this vLLM."""
    num_gpus = 0 if current_platform.is_cpu() else current_platform.device_count()
    values: dict[str, Any] = {
        "model": config.model,
        "revision": config.revision,
        "tokenizer": config.tokenizer,
        "dtype": config.dtype,
        "quantization": config.quantization,
        "pipeline_parallel_size": pipeline_parallel_size(config, num_gpus=num_gpus),
        "tensor_parallel_size": config.tensor_parallel_size,
        "max_model_len": config.max_model_len,
        "enable_prefix_caching": config.enable_prefix_caching,
        "trust_remote_code": config.trust_remote_code,
        "seed": config.seed,
        # Compiling takes minutes on a CPU and gains little there.
        "enforce_eager": num_gpus == 0 if config.enforce_eager is None else config.enforce_eager,
    }
    if num_gpus:
        values["gpu_memory_utilization"] = config.gpu_memory_utilization
    else:
        values["kv_cache_memory_bytes"] = int(config.cpu_kv_gib * GIB)
    for name in ("max_num_seqs", "max_num_batched_tokens", "block_size"):
        if (value := getattr(config, name)) is not None:
            values[name] = value
    try:
        return EngineArgs(**{**values, **config.vllm})
    except TypeError as error:
        raise ValueError(
            f"vllm: {error} (these are the arguments of vLLM {vllm.__version__}'s EngineArgs)"
        ) from error


def pipeline_parallel_size(config: EngineConfig, *, num_gpus: int) -> int:
    """The stages to run: as asked, else one for each group of ``tensor_parallel_size`` GPUs."""
    needed = (config.pipeline_parallel_size or 1) * config.tensor_parallel_size
    if num_gpus == 0 and needed > 1:
        raise ValueError(
            f"pipeline_parallel_size {config.pipeline_parallel_size or 1} × tensor_parallel_size "
            f"{config.tensor_parallel_size} needs {needed} GPUs, and this machine shows none; leave both out "
            "to run on the CPU"
        )
    if num_gpus and needed > num_gpus:
        raise ValueError(
            f"pipeline_parallel_size {config.pipeline_parallel_size or 1} × tensor_parallel_size "
            f"{config.tensor_parallel_size} needs {needed} GPUs, and this machine shows {num_gpus} "
            f"(CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES', 'not set')})"
        )
    if config.pipeline_parallel_size is not None or num_gpus == 0:
        return config.pipeline_parallel_size or 1
    return max(1, num_gpus // config.tensor_parallel_size)


def prepare_environment() -> None:
    """Set what vLLM reads from the environment, before the first engine of this process."""
    # The server has threads (gRPC's among them), and a forked child would inherit their locks, held.
    os.environ["VLLM_WORKER_MULTIPROCESSING_METHOD"] = "spawn"
    # Reports of use would leave the user's network, and a closed network makes their thread wait.
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
