"""Layouts, pools and token tables that the tests of the kernels share."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch

from pipemax.transfer.cuda.launch_checks import TokenTable
from pipemax.transfer.layout import BlockLayout, compact_layout

POISON = 0xA5


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    name: str
    layout: BlockLayout
    dtype: torch.dtype


def _case(name: str, dtype: torch.dtype, *, layers: int, heads: int, tokens: int, head_dim: int) -> Case:
    layout = compact_layout(
        num_layers=layers,
        num_kv_heads=heads,
        block_tokens=tokens,
        content_bytes=2 * head_dim * dtype.itemsize,
    )
    return Case(name=name, layout=layout, dtype=dtype)


def _padded(case: Case, layer_pad: int, block_pad: int) -> Case:
    layout = case.layout
    layer_stride = layout.layer_bytes + layer_pad
    padded = replace(
        layout,
        layer_stride_bytes=layer_stride,
        block_bytes=layout.num_layers * layer_stride + block_pad,
    )
    return replace(case, layout=padded)


CASES = (
    _case("bf16", torch.bfloat16, layers=3, heads=8, tokens=16, head_dim=128),
    _case("fp16", torch.float16, layers=2, heads=2, tokens=32, head_dim=64),
    _case("fp32", torch.float32, layers=2, heads=1, tokens=4, head_dim=48),
    _case("fp8", torch.float8_e4m3fn, layers=3, heads=4, tokens=16, head_dim=64),
    _padded(_case("padded", torch.bfloat16, layers=3, heads=2, tokens=8, head_dim=16), 64, 192),
    _padded(_case("words of 4", torch.bfloat16, layers=2, heads=2, tokens=3, head_dim=5), 4, 20),
    _case("words of 1", torch.float8_e5m2, layers=3, heads=3, tokens=5, head_dim=7),
)


def random_pool(layout: BlockLayout, num_blocks: int, rng: np.random.Generator) -> torch.Tensor:
    return torch.from_numpy(rng.integers(0, 256, layout.pool_shape(num_blocks), dtype=np.uint8))


def poisoned_pool(layout: BlockLayout, num_blocks: int) -> torch.Tensor:
    return torch.full(layout.pool_shape(num_blocks), POISON, dtype=torch.uint8)


def random_tokens(
    layout: BlockLayout, num_tokens: int, num_gpu_blocks: int, num_host_blocks: int, rng: np.random.Generator
) -> TokenTable:
    """No two with the same target; the slot is the same in both pools."""
    places = rng.choice(num_host_blocks * layout.block_tokens, num_tokens, replace=False)
    host_block, slot = np.divmod(places, layout.block_tokens)
    gpu_block = rng.integers(0, num_gpu_blocks, num_tokens)
    return np.stack((gpu_block, slot, host_block), axis=1).astype(np.int32)


def seeds(count: int) -> Iterator[np.random.Generator]:
    return (np.random.default_rng(seed) for seed in range(count))
