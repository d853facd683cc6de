"""Keys and values that left layer by layer lie in their blocks as the reference puts them, and nowhere else."""

import numpy as np
import pytest
import torch

from bench.stage import kernel_reference
from pipemax.transfer.layout import BlockLayout, compact_layout
from pipemax.transfer.per_layer import PerLayerOffload

HEADS, HEAD_DIM, TOKENS = 2, 8, 9
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn)


def layout_of(dtype: torch.dtype) -> BlockLayout:
    return compact_layout(
        num_layers=3, num_kv_heads=HEADS, block_tokens=4, content_bytes=2 * HEAD_DIM * dtype.itemsize
    )


def random_values(dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(3, TOKENS, HEADS, HEAD_DIM, generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tokens_lie_as_the_reference_puts_them(dtype: torch.dtype) -> None:
    layout = layout_of(dtype)
    keys, values = random_values(dtype, 0), random_values(dtype, 1)
    host_block, slot = np.divmod(np.random.default_rng(0).permutation(6 * 4)[:TOKENS], 4)
    tokens = torch.from_numpy(np.stack((np.zeros(TOKENS, int), slot, host_block), axis=1))
    expected = torch.full(layout.pool_shape(6), 0xA5, dtype=torch.uint8)
    kernel_reference.pack_tokens(expected, layout, tokens, keys, values)
    host = torch.full(layout.pool_shape(6), 0xA5, dtype=torch.uint8)
    offload = PerLayerOffload(layout, dtype, max_tokens=TOKENS + 3)
    for layer in (0, 1, 2):
        offload.offload_layer(layer, keys[layer], values[layer])
    offload.wait()
    offload.pack(host, tokens)
    assert torch.equal(host, expected)
    assert not torch.equal(host, torch.full_like(host, 0xA5))


class TestRefusals:
    @pytest.fixture
    def offload(self) -> PerLayerOffload:
        return PerLayerOffload(layout_of(torch.bfloat16), torch.bfloat16, max_tokens=4)

    def test_more_tokens_than_staging_holds_are_refused(self, offload: PerLayerOffload) -> None:
        keys = random_values(torch.bfloat16, 0)[0]
        with pytest.raises(ValueError, match=r"keys of \(9, 2, 8\) do not fit into staging of \(4, 2, 8\)"):
            offload.offload_layer(0, keys, keys)

    def test_other_dtypes_of_keys_and_values_are_refused(self, offload: PerLayerOffload) -> None:
        keys = random_values(torch.float16, 0)[0, :4]
        with pytest.raises(ValueError, match=r"must be torch\.bfloat16 of one shape"):
            offload.offload_layer(0, keys, keys)

    def test_a_table_with_another_number_of_tokens_is_refused(self, offload: PerLayerOffload) -> None:
        keys = random_values(torch.bfloat16, 0)[0, :4]
        offload.offload_layer(0, keys, keys)
        host = torch.zeros(layout_of(torch.bfloat16).pool_shape(1), dtype=torch.uint8)
        with pytest.raises(ValueError, match=r"4 tokens were copied, the table is \(3, 3\)"):
            offload.pack(host, torch.zeros(3, 3, dtype=torch.int64))

    def test_content_that_is_not_a_key_and_a_value_is_refused(self) -> None:
        layout = compact_layout(num_layers=1, num_kv_heads=1, block_tokens=1, content_bytes=6)
        with pytest.raises(ValueError, match="no pair of keys and values"):
            PerLayerOffload(layout, torch.float32, max_tokens=1)
