"""A stage's two KV pools for the benches, block-first or layer-first, behind one addressing.

Copies and kernels know blocks of bytes. Layer-first is the same machinery over smaller blocks: layer ``l`` of block
``b`` is the part ``l · num_blocks + b``, and one block becomes as many copies as it has layers.

    # block-first: rows (num_blocks, layers · layer_bytes)
    # layer-first: rows (layers · num_blocks, layer_bytes)
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

import torch

from pipemax.domain.specs import ModelSpec
from pipemax.domain.units import GpuBlockId, HostBlockId
from pipemax.transfer.commands import BlockPrefetch, BlockStore, TokenStore
from pipemax.transfer.layout import BlockLayout, compact_layout, layer_views


def stage_layout(model: ModelSpec, num_layers: int, block_tokens: int, dtype: torch.dtype) -> BlockLayout:
    """Return the layout of one block over all layers of a stage, keys and values packed."""
    return compact_layout(
        num_layers=num_layers,
        num_kv_heads=model.num_kv_heads,
        block_tokens=block_tokens,
        content_bytes=2 * model.head_dim * dtype.itemsize,
    )


class KvLayout(StrEnum):
    """The order of a block's KV in memory, which decides how many pieces a copy of it needs (paper, Section 3.4.2)."""

    BLOCK_FIRST = "block_first"
    """All layers of a stage in one piece."""
    LAYER_FIRST = "layer_first"
    """One piece per layer, keys and values packed, as in vLLM."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolPlan:
    """The division of a stage's two pools into parts that are each copied as one."""

    layout: KvLayout
    block: BlockLayout
    """The layout of a whole block, whatever the order in memory."""
    gpu_blocks: int
    host_blocks: int

    @property
    def parts_per_block(self) -> int:
        return 1 if self.layout is KvLayout.BLOCK_FIRST else self.block.num_layers

    @property
    def part(self) -> BlockLayout:
        """The layout of a contiguous part."""
        if self.layout is KvLayout.BLOCK_FIRST:
            return self.block
        return compact_layout(
            num_layers=1,
            num_kv_heads=self.block.num_kv_heads,
            block_tokens=self.block.block_tokens,
            content_bytes=self.block.content_bytes,
        )

    @property
    def gpu_parts(self) -> int:
        return self.gpu_blocks * self.parts_per_block

    @property
    def host_parts(self) -> int:
        return self.host_blocks * self.parts_per_block

    def prefetches(self, prefetches: Iterable[BlockPrefetch]) -> tuple[BlockPrefetch, ...]:
        """Return block copies as copies of parts."""
        if self.parts_per_block == 1:
            return tuple(prefetches)
        return tuple(
            BlockPrefetch(
                HostBlockId(layer * self.host_blocks + prefetch.source),
                GpuBlockId(layer * self.gpu_blocks + prefetch.target),
            )
            for prefetch in prefetches
            for layer in range(self.parts_per_block)
        )

    def stores(self, stores: Iterable[BlockStore]) -> tuple[BlockStore, ...]:
        if self.parts_per_block == 1:
            return tuple(stores)
        return tuple(
            BlockStore(
                GpuBlockId(layer * self.gpu_blocks + store.source),
                HostBlockId(layer * self.host_blocks + store.target),
            )
            for store in stores
            for layer in range(self.parts_per_block)
        )

    def token_stores(self, stores: Iterable[TokenStore]) -> tuple[TokenStore, ...]:
        if self.parts_per_block == 1:
            return tuple(stores)
        return tuple(
            store._replace(
                source=GpuBlockId(layer * self.gpu_blocks + store.source),
                target=HostBlockId(layer * self.host_blocks + store.target),
            )
            for store in stores
            for layer in range(self.parts_per_block)
        )

    def layer_views(self, rows: torch.Tensor, num_blocks: int, dtype: torch.dtype) -> list[torch.Tensor]:
        """Return views of each layer of a pool of ``num_blocks``: ``(num_blocks, kv_heads, block_tokens, content)``."""
        if self.layout is KvLayout.BLOCK_FIRST:
            return layer_views(rows, self.block, dtype)
        (parts,) = layer_views(rows, self.part, dtype)
        return list(parts.split(num_blocks))
