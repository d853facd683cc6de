"""Check the arguments of a KV kernel and choose its geometry. Pure, and tested without a GPU.

A kernel checks nothing itself: a wrong block id would overwrite another request's KV, or memory of the driver.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from pipemax.transfer.commands import TokenStore
from pipemax.transfer.layout import BlockLayout

TokenTable = NDArray[np.int32]
"""(num_tokens, 3): GPU block, slot within it, host block."""

THREADS = 256
"""A group copies one token's part of one layer: the 8 heads of 512 bytes of a 70B model are 256 words of 16."""
DEFAULT_MAX_GROUPS = 64
"""The link is slower than a few SMs: more groups would only take SMs from the model."""

WORD_BYTES = (16, 4, 1)
"""Bytes that one thread moves at once; ``kv_copy.cu`` has a kernel for each, largest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """The launch geometry of a kernel."""

    word_bytes: int
    num_groups: int
    num_threads: int = THREADS


def check_pool(name: str, rows: torch.Tensor, layout: BlockLayout) -> None:
    """Raise ``ValueError``, with ``name``, unless ``rows`` is a contiguous pool of bytes in this layout."""
    if rows.dtype != torch.uint8 or rows.dim() != 2 or rows.shape[1] != layout.block_bytes:
        raise ValueError(
            f"the {name} pool must be bytes of shape (num_blocks, {layout.block_bytes}), "
            f"not {rows.dtype} of {tuple(rows.shape)}"
        )
    if not rows.is_contiguous():
        raise ValueError(f"the {name} pool must be contiguous, its strides are {rows.stride()}")


def check_tokens(
    tokens: TokenTable, layout: BlockLayout, *, num_gpu_blocks: int, num_host_blocks: int
) -> None:
    """Raise ``ValueError`` for the first row that leaves a pool or a block."""
    if tokens.dtype != np.int32 or tokens.ndim != 2 or tokens.shape[1] != 3:
        raise ValueError(
            f"the token table must be int32 of shape (num_tokens, 3), not {tokens.dtype} of {tokens.shape}"
        )
    if not tokens.flags.c_contiguous:
        raise ValueError(f"the token table must be contiguous, its strides are {tokens.strides}")
    columns = (
        ("GPU block", num_gpu_blocks),
        ("slot", layout.block_tokens),
        ("host block", num_host_blocks),
    )
    for column, (name, limit) in enumerate(columns):
        values = tokens[:, column]
        wrong = np.flatnonzero((values < 0) | (values >= limit))
        if wrong.size:
            row = int(wrong[0])
            raise ValueError(f"token {row}: {name} {int(values[row])} is not in [0, {limit})")


def token_table(stores: Sequence[TokenStore]) -> TokenTable:
    """Return one row for each token of ``stores``, in their order."""
    fields = np.array(stores, dtype=np.int32).reshape(-1, 4)
    source, target, first_slot, num_slots = fields.T
    within = np.arange(num_slots.sum(), dtype=np.int32) - np.repeat(
        np.cumsum(num_slots) - num_slots, num_slots
    )
    slots = np.repeat(first_slot, num_slots) + within
    return np.stack((np.repeat(source, num_slots), slots, np.repeat(target, num_slots)), axis=1).astype(
        np.int32
    )


def check_devices(gpu: torch.Tensor, host: torch.Tensor, device: torch.device) -> None:
    """Raise ``ValueError`` unless ``gpu`` is on ``device`` and ``host`` is pinned: kernels reach no other memory."""
    if gpu.device != device:
        raise ValueError(f"the GPU pool is on {gpu.device}, the kernels on {device}")
    if host.device.type != "cpu" or not host.is_pinned():
        raise ValueError(
            f"the host pool must be pinned host memory, it is "
            f"{'pageable' if host.device.type == 'cpu' else 'on ' + str(host.device)}: use PinnedHostPool"
        )


def token_geometry(
    layout: BlockLayout, num_tokens: int, *addresses: int, max_groups: int = DEFAULT_MAX_GROUPS
) -> Geometry:
    """Return the geometry of ``offload_tokens`` on pools that begin at ``addresses``."""
    word = _largest_word(
        layout.content_bytes, layout.head_bytes, layout.layer_stride_bytes, layout.block_bytes, *addresses
    )
    return Geometry(word_bytes=word, num_groups=min(max_groups, num_tokens * layout.num_layers))


def _largest_word(*values: int) -> int:
    """Return the largest word size that divides all values, because words must be aligned."""
    return next(word for word in WORD_BYTES if all(value % word == 0 for value in values))
