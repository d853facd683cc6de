"""The GPU's blocks where each group of layers has block tables of its own, and blocks that left a window are free.

Nothing is found by its content here: such engines have no prefix cache.
"""

from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
from vllm.v1.core.single_type_kv_cache_manager import SlidingWindowManager
from vllm.v1.request import Request

from pipemax.domain.kv_groups import KvGroups
from pipemax.domain.units import GpuBlockId, ceil_div
from pipemax.vllm_ext.seam.gpu_blocks import GpuBlocks


class WindowedGpuBlocks(GpuBlocks):
    """``GpuBlocks`` over the tables of several groups, those with full attention before those with windows."""

    def __init__(self, manager: KVCacheManager, block_tokens: int, groups: KvGroups) -> None:
        super().__init__(manager, block_tokens)
        self._kv_groups = groups
        self._groups = sorted(
            manager.coordinator.single_type_managers, key=lambda one: isinstance(one, SlidingWindowManager)
        )

    def _allocate_at_border(self, request: Request) -> KVCacheBlocks | None:
        return self._allocate_slots(request, 1, num_lookahead_tokens=0)

    def tables(self, request_id: str) -> tuple[list[int], ...]:
        managers = self._manager.coordinator.single_type_managers  # in the order that the workers know
        return tuple([block.block_id for block in group.req_to_blocks[request_id]] for group in managers)

    def block(self, request_id: str, index: int, group: int = 0) -> GpuBlockId:
        return GpuBlockId(self._groups[group].req_to_blocks[request_id][index].block_id)

    def new_blocks(self, request_id: str, first: int, end: int) -> list[GpuBlockId]:
        return [
            GpuBlockId(block.block_id)
            for group in self._groups
            for block in group.req_to_blocks[request_id][first:end]
        ]

    def kv_blocks(self, request_id: str, num_tokens: int) -> list[int]:
        end = ceil_div(num_tokens, self._block_tokens)
        return [
            block.block_id
            for group in self._groups
            for block in group.req_to_blocks[request_id][:end]
            if not block.is_null
        ]

    def free_skipped(self, request: Request) -> None:
        self._manager.remove_skipped_blocks(request.request_id, request.num_computed_tokens)

    def allocate_for_prefetch(self, request: Request) -> int | None:
        tokens, size = request.num_computed_tokens, self._block_tokens
        end = ceil_div(min(tokens + 1, self._manager.max_model_len), size)
        skipped = self._kv_groups.skipped_blocks(tokens, size)
        firsts = [0] * self._kv_groups.full + [skipped] * self._kv_groups.window
        if sum(end - first for first in firsts) > self.num_free:
            return None
        for group, first in zip(self._groups, firsts, strict=True):
            blocks = self._take(end - first)
            assert not group.req_to_blocks.get(request.request_id), f"{request.request_id} has blocks"
            group.req_to_blocks[request.request_id] = [self._pool.null_block] * first + blocks
        return 0

    def publish_later(self, request: Request, num_shared: int) -> None:
        pass  # nothing is shared
