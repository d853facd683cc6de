"""The layout of one pipeline stage's KV blocks in memory. Both pools have it, on any device.

    # one pool, block-first, keys and values packed in the content (vLLM's BLHNC):
    # (num_blocks, layers, kv_heads, block_tokens, content)
    #
    # one block, a contiguous row over all layers of the stage, so that moving it is one copy:
    # | layer 0: head 0 [ token 0 | token 1 | … ], head 1 […], … | pad | layer 1 … | pad | … | pad |
    # '------------------- layer_stride_bytes -------------------'
    # '------------------------------------- block_bytes -------------------------------------------'

vLLM pads where an attention kernel needs aligned pages or blocks; pads move with their block. A token's keys and
values of one layer are ``kv_heads`` runs of ``content_bytes``. Kernels for CPUs order the values within a layer's
part differently (they transpose the keys): there only whole blocks may move, never single tokens.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

ByteRows = NDArray[np.uint8]
"""(num_blocks, block_bytes): a pool as raw bytes, for any KV dtype."""

KV_DTYPES = (
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.uint8,  # how vLLM stores fp8
)


class LayerSpan(NamedTuple):
    """The bytes ``[first_byte, first_byte + num_bytes)`` of a block: some of its layers, without the last one's pad."""

    first_byte: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockLayout:
    """The shape of one block on one stage, in counts and bytes."""

    num_layers: int
    num_kv_heads: int
    block_tokens: int
    content_bytes: int
    """Size of the keys and values of one token and head."""
    layer_stride_bytes: int
    """Distance from one layer's part of a block to the next."""
    block_bytes: int
    """Distance from one block to the next, pads included."""

    def __post_init__(self) -> None:
        counts = (self.num_layers, self.num_kv_heads, self.block_tokens, self.content_bytes)
        if min(counts) < 1:
            raise ValueError(f"a block layout's counts are at least 1: {self}")
        if self.layer_stride_bytes < self.layer_bytes or self.block_bytes < self._end_of_last_layer:
            raise ValueError(f"the layers of a block overlap: {self}")

    @property
    def head_bytes(self) -> int:
        """The size of one head's part of one layer: ``block_tokens`` runs."""
        return self.block_tokens * self.content_bytes

    @property
    def layer_bytes(self) -> int:
        """The size of one layer's part of a block, without its pad."""
        return self.num_kv_heads * self.head_bytes

    @property
    def token_bytes(self) -> int:
        """The size of one token's KV over all layers of the stage."""
        return self.num_layers * self.num_kv_heads * self.content_bytes

    def pool_shape(self, num_blocks: int) -> tuple[int, int]:
        return (num_blocks, self.block_bytes)

    def layer_groups(self, num_groups: int) -> tuple[range, ...]:
        """Divide the layers into groups that differ by one layer at most; ``ValueError`` if one would have none."""
        if not 1 <= num_groups <= self.num_layers:
            raise ValueError(f"{self.num_layers} layers cannot make {num_groups} groups")
        ends = [self.num_layers * (group + 1) // num_groups for group in range(num_groups)]
        return tuple(range(first, end) for first, end in pairwise([0, *ends]))

    def group_spans(self, num_groups: int) -> tuple["LayerSpan", ...]:
        """Return the bytes of each of ``layer_groups``."""
        return tuple(
            LayerSpan(
                layers.start * self.layer_stride_bytes,
                (len(layers) - 1) * self.layer_stride_bytes + self.layer_bytes,
            )
            for layers in self.layer_groups(num_groups)
        )

    @property
    def _end_of_last_layer(self) -> int:
        return (self.num_layers - 1) * self.layer_stride_bytes + self.layer_bytes


def compact_layout(
    *, num_layers: int, num_kv_heads: int, block_tokens: int, content_bytes: int
) -> BlockLayout:
    """Return the layout without pads. ``content_bytes``: keys and values of one token and head."""
    layer_bytes = num_kv_heads * block_tokens * content_bytes
    return BlockLayout(
        num_layers=num_layers,
        num_kv_heads=num_kv_heads,
        block_tokens=block_tokens,
        content_bytes=content_bytes,
        layer_stride_bytes=layer_bytes,
        block_bytes=num_layers * layer_bytes,
    )


def describe_layers(layers: Mapping[str, torch.Tensor]) -> tuple[BlockLayout, torch.Tensor]:
    """Return the layout of a stage's KV caches, and all of them as one zero-copy tensor of bytes.

    ``layers``: by name, in any order, each ``(num_blocks, kv_heads, block_tokens, content)`` of a dtype in
    ``KV_DTYPES``; layers of several groups may share a place. The tensor is ``(num_blocks, block_bytes)`` on their
    device. ``ValueError`` unless the layers interleave block-first in one storage.
    """
    if not layers:
        raise ValueError("a stage without KV caches has nothing to transfer")
    # Layers of several groups may share a place: a block then holds KV of one group's layers.
    offsets = sorted({layer.storage_offset() for layer in layers.values()})
    tensors = sorted(layers.values(), key=lambda layer: layer.storage_offset())
    first = tensors[0]
    if first.dim() != 4:
        raise ValueError(
            f"a layer's KV cache has the shape {tuple(first.shape)}, not (blocks, heads, tokens, content)"
        )
    if first.dtype not in KV_DTYPES:
        raise ValueError(f"KV caches of {first.dtype} are not supported; {_names(KV_DTYPES)} are")
    num_blocks, num_heads, block_tokens, content = first.shape
    layer_values = num_heads * block_tokens * content
    layer_stride = int(offsets[1] - offsets[0]) if len(offsets) > 1 else layer_values
    # A block may be longer than its layers. With one block, strides over blocks mean nothing.
    least_values = (len(offsets) - 1) * layer_stride + layer_values
    row_values = max(int(first.stride(0)), least_values) if num_blocks > 1 else least_values
    for layer in tensors:
        index = offsets.index(layer.storage_offset())
        expected_offset = first.storage_offset() + index * layer_stride
        stride = (row_values if num_blocks > 1 else layer.stride(0), block_tokens * content, content, 1)
        is_block_first = (
            layer.shape == first.shape
            and layer.dtype == first.dtype
            and layer.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
            and layer_stride >= layer_values
            and layer.stride() == stride
            and layer.storage_offset() == expected_offset
        )
        if not is_block_first:
            raise ValueError(
                f"KV caches are not block-first: layer {index} of {len(offsets)} has shape {tuple(layer.shape)}, "
                f"stride {layer.stride()}, offset {layer.storage_offset()}; stride {stride} and "
                f"offset {expected_offset} are needed (vLLM: VLLM_KV_CACHE_LAYOUT=BLHNC)"
            )
    value_bytes = first.element_size()
    layout = BlockLayout(
        num_layers=len(offsets),
        num_kv_heads=num_heads,
        block_tokens=block_tokens,
        content_bytes=content * value_bytes,
        layer_stride_bytes=layer_stride * value_bytes,
        block_bytes=row_values * value_bytes,
    )
    return layout, _as_bytes(first, layout, num_blocks)


def _as_bytes(first: torch.Tensor, layout: BlockLayout, num_blocks: int) -> torch.Tensor:
    """View the blocks whose first layer is ``first`` as ``(num_blocks, block_bytes)`` bytes."""
    storage = first.untyped_storage()
    first_byte = first.storage_offset() * first.element_size()
    num_bytes = num_blocks * layout.block_bytes
    if first_byte + num_bytes > storage.nbytes():
        raise ValueError(
            f"KV caches end after {storage.nbytes():,} bytes, {num_blocks} blocks of {layout.block_bytes:,} need "
            f"{first_byte + num_bytes:,}"
        )
    memory = torch.empty(0, dtype=torch.uint8, device=first.device).set_(storage)
    return memory[first_byte : first_byte + num_bytes].view(layout.pool_shape(num_blocks))


def layer_views(rows: torch.Tensor, layout: BlockLayout, dtype: torch.dtype) -> list[torch.Tensor]:
    """Return a zero-copy view of each layer of a pool: the reverse of ``describe_layers``.

    ``rows``: ``(num_blocks, block_bytes)`` bytes on any device. Each view is ``(num_blocks, kv_heads, block_tokens,
    content)`` of ``dtype``. ``ValueError`` if rows or dtype do not fit the layout.
    """
    if rows.dim() != 2 or rows.shape[1] != layout.block_bytes or rows.dtype != torch.uint8:
        raise ValueError(
            f"a pool of this layout is bytes of shape (num_blocks, {layout.block_bytes}), not {rows.dtype} of "
            f"{tuple(rows.shape)}"
        )
    size = dtype.itemsize
    if any(n % size for n in (layout.content_bytes, layout.layer_stride_bytes, layout.block_bytes)):
        raise ValueError(f"{dtype} values of {size} bytes do not fit {layout}")
    values = rows.view(dtype)
    views = []
    for layer in range(layout.num_layers):
        begin = layer * layout.layer_stride_bytes // size
        part = values[:, begin : begin + layout.layer_bytes // size]
        views.append(part.view(len(rows), layout.num_kv_heads, layout.block_tokens, -1))
    return views


def _names(dtypes: tuple[torch.dtype, ...]) -> str:
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
