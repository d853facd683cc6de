"""How one pipeline stage's KV blocks lie in memory. Both pools have this one layout.

    # one block, block-first, keys and values packed in the content:
    # (layers, kv_heads, block_tokens, content)
    # one pool:
    # (num_blocks, layers, kv_heads, block_tokens, content)

A block is one contiguous row over all layers of the stage (vLLM's ``BLHNC``), so that moving it is one copy. Within a
layer's part kernels may order the values as they like (vLLM's for CPUs transpose the keys): only whole blocks move.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

ByteRows = NDArray[np.uint8]
"""(num_blocks, layers · kv_heads, block_tokens, content bytes): a pool as raw bytes, whatever the KV's dtype."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockLayout:
    """The shape of one block on one stage."""

    num_layers: int
    num_kv_heads: int
    block_tokens: int
    content_bytes: int
    """Keys and values of one token and head."""

    @property
    def block_bytes(self) -> int:
        return self.num_layers * self.num_kv_heads * self.block_tokens * self.content_bytes

    def pool_shape(self, num_blocks: int) -> tuple[int, int, int, int]:
        return (num_blocks, self.num_layers * self.num_kv_heads, self.block_tokens, self.content_bytes)


def describe_layers(layers: Mapping[str, torch.Tensor]) -> tuple[BlockLayout, torch.Tensor]:
    """The layout of a stage's KV caches, and all of them as one tensor of bytes without a copy.

    ``layers``: by name, in any order, each ``(num_blocks, kv_heads, block_tokens, content)``. The result is
    ``(num_blocks, layers · kv_heads, block_tokens, content bytes)``. ``ValueError`` where the layers do not
    interleave block-first in one storage.
    """
    if not layers:
        raise ValueError("a stage without KV caches has nothing to transfer")
    tensors = sorted(layers.values(), key=lambda layer: layer.storage_offset())
    first = tensors[0]
    if first.dim() != 4:
        raise ValueError(
            f"a layer's KV cache has the shape {tuple(first.shape)}, not (blocks, heads, tokens, content)"
        )
    num_blocks, num_heads, block_tokens, content = first.shape
    layer_values = num_heads * block_tokens * content
    row_values = len(tensors) * layer_values
    interior = (block_tokens * content, content, 1)
    for index, layer in enumerate(tensors):
        expected_offset = first.storage_offset() + index * layer_values
        is_block_first = (
            layer.shape == first.shape
            and layer.dtype == first.dtype
            and layer.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
            and layer.stride() == (row_values, *interior)
            and layer.storage_offset() == expected_offset
        )
        if not is_block_first:
            raise ValueError(
                f"KV caches are not block-first: layer {index} of {len(tensors)} has shape {tuple(layer.shape)}, "
                f"stride {layer.stride()}, offset {layer.storage_offset()}; stride {(row_values, *interior)} and "
                f"offset {expected_offset} are needed"
            )
    value_bytes = first.element_size()
    layout = BlockLayout(
        num_layers=len(tensors),
        num_kv_heads=num_heads,
        block_tokens=block_tokens,
        content_bytes=content * value_bytes,
    )
    rows = torch.empty(0, dtype=torch.uint8, device=first.device).set_(first.untyped_storage())
    first_byte = first.storage_offset() * value_bytes
    rows = rows[first_byte : first_byte + num_blocks * layout.block_bytes]
    return layout, rows.view(layout.pool_shape(num_blocks))
