"""Say how much a started engine has room for, from its vLLM config."""

from pipemax.control.controller_config import HOST_HIGH_WATERMARK
from pipemax.vllm_ext.launch.vllm_config import CONNECTOR
from pipemax.vllm_ext.runtime_settings import RuntimeSettings
from pipemax.vllm_ext.seam.vllm_types import VllmConfig

_QUEUE_DEPTH = 2
"""Stock vLLM is sent this many times its KV capacity."""
_POOLING_STEPS = 16
"""An engine with a pooling task is sent the tokens of this many steps."""


def admission_capacity_tokens(vllm_config: VllmConfig) -> int:
    """Return how many tokens of requests an empty engine may be sent.

    Under PipeMax that is what the host pool holds up to its high watermark, otherwise twice what the GPU pool holds:
    what runs, and as much waiting behind it.
    """
    if vllm_config.model_config.runner_type == "pooling":
        # Each prompt is read in one step or few, and leaves; some such models have no KV cache at all.
        return _POOLING_STEPS * vllm_config.scheduler_config.max_num_batched_tokens
    cache, settings = vllm_config.cache_config, _pipemax_settings(vllm_config)
    if settings is None:
        return _QUEUE_DEPTH * (cache.num_gpu_blocks or 0) * cache.block_size
    watermark = settings.controller.get("host_high_watermark", HOST_HIGH_WATERMARK)
    return int(watermark * settings.host_blocks(cache.block_size)) * cache.block_size


def real_max_num_seqs(vllm_config: VllmConfig) -> int:
    """Return the maximum of requests in one step, also where vLLM chose it for the GPU."""
    settings = _pipemax_settings(vllm_config)
    # Under PipeMax, vLLM's own number may be that of the runner's slots.
    return vllm_config.scheduler_config.max_num_seqs if settings is None else settings.max_num_seqs


def _pipemax_settings(vllm_config: VllmConfig) -> RuntimeSettings | None:
    """Return PipeMax's settings; None under stock vLLM, which has no connector, or one of the user's."""
    transfer = vllm_config.kv_transfer_config
    if transfer is None or transfer.kv_connector != CONNECTOR:
        return None
    return RuntimeSettings.from_extra_config(transfer.kv_connector_extra_config)
