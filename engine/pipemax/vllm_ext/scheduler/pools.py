"""Make the scheduler's halves of both pools, for the groups of layers that the model has."""

from pipemax.domain.kv_groups import KvGroups
from pipemax.vllm_ext.runtime_settings import RuntimeSettings
from pipemax.vllm_ext.scheduler.host_blocks import HostBlocks
from pipemax.vllm_ext.scheduler.windowed_host_blocks import WindowedHostBlocks
from pipemax.vllm_ext.seam.gpu_blocks import GpuBlocks
from pipemax.vllm_ext.seam.vllm_types import KVCacheManager
from pipemax.vllm_ext.seam.windowed_gpu_blocks import WindowedGpuBlocks


def make_pools(
    manager: KVCacheManager, block_tokens: int, groups: KvGroups, settings: RuntimeSettings
) -> tuple[GpuBlocks, HostBlocks]:
    """Return the GPU's blocks, over vLLM's manager, and the host's."""
    num_blocks, stores_tokens = settings.host_blocks(block_tokens), settings.stores_tokens
    if not groups.window:
        host = HostBlocks(num_blocks=num_blocks, block_tokens=block_tokens, stores_tokens=stores_tokens)
        return GpuBlocks(manager, block_tokens), host
    windowed = WindowedHostBlocks(
        num_blocks=num_blocks, block_tokens=block_tokens, groups=groups, stores_tokens=stores_tokens
    )
    return WindowedGpuBlocks(manager, block_tokens, groups), windowed
