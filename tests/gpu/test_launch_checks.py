"""What does not fit is refused before a kernel is launched, in one sentence with the numbers. No GPU is needed."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from pipemax.domain.units import GpuBlockId, HostBlockId
from pipemax.transfer.commands import BlockStore, TokenStore
from pipemax.transfer.cpu import CpuCopyBackend
from pipemax.transfer.cuda.launch_checks import (
    check_devices,
    check_pool,
    check_tokens,
    token_geometry,
    token_table,
)
from pipemax.transfer.layout import describe_layers, layer_views
from tests.gpu import kernel_reference
from tests.gpu.pools import CASES, POISON, Case, poisoned_pool, random_pool, seeds

LAYOUT = CASES[0].layout


class TestPools:
    def test_a_pool_of_the_layout_passes(self) -> None:
        check_pool("GPU", poisoned_pool(LAYOUT, 3), LAYOUT)

    def test_other_shapes_dtypes_and_strides_are_refused(self) -> None:
        pool = poisoned_pool(LAYOUT, 4)
        with pytest.raises(ValueError, match=r"host pool must be bytes of shape \(num_blocks, 196608\)"):
            check_pool("host", pool[:, :-1], LAYOUT)
        with pytest.raises(ValueError, match=r"not torch\.int8"):
            check_pool("host", pool.view(torch.int8), LAYOUT)
        with pytest.raises(ValueError, match="GPU pool must be contiguous"):
            check_pool("GPU", pool[::2], LAYOUT)

    def test_pageable_memory_and_other_devices_are_refused(self) -> None:
        pool = poisoned_pool(LAYOUT, 1)
        with pytest.raises(ValueError, match="GPU pool is on cpu, the kernels on cuda:0"):
            check_devices(pool, pool, torch.device("cuda", 0))
        with pytest.raises(ValueError, match="pageable: use PinnedHostPool"):
            check_devices(pool, pool, torch.device("cpu"))


class TestTokens:
    @pytest.mark.parametrize(
        ("row", "message"),
        [
            ((4, 0, 0), r"token 1: GPU block 4 is not in \[0, 4\)"),
            ((-1, 0, 0), r"token 1: GPU block -1"),
            ((0, 16, 0), r"token 1: slot 16 is not in \[0, 16\)"),
            ((0, 0, 9), r"token 1: host block 9 is not in \[0, 9\)"),
        ],
    )
    def test_a_token_outside_is_refused(self, row: tuple[int, int, int], message: str) -> None:
        tokens = np.array([(3, 15, 8), row], dtype=np.int32)
        with pytest.raises(ValueError, match=message):
            check_tokens(tokens, LAYOUT, num_gpu_blocks=4, num_host_blocks=9)
        check_tokens(tokens[:1], LAYOUT, num_gpu_blocks=4, num_host_blocks=9)

    def test_a_table_has_a_row_for_each_token_of_the_stores(self) -> None:
        stores = [
            TokenStore(GpuBlockId(7), HostBlockId(2), first_slot=3, num_slots=2),
            TokenStore(GpuBlockId(5), HostBlockId(9), first_slot=0, num_slots=1),
        ]
        table = token_table(stores)
        assert table.dtype == np.int32
        assert table.tolist() == [[7, 3, 2], [7, 4, 2], [5, 0, 9]]
        assert token_table([]).shape == (0, 3)

    def test_other_tables_are_refused(self) -> None:
        with pytest.raises(ValueError, match=r"int32 of shape \(num_tokens, 3\), not int64"):
            check_tokens(np.zeros((2, 3), np.int64), LAYOUT, num_gpu_blocks=1, num_host_blocks=1)
        with pytest.raises(ValueError, match=r"not int32 of \(2, 2\)"):
            check_tokens(np.zeros((2, 2), np.int32), LAYOUT, num_gpu_blocks=1, num_host_blocks=1)
        with pytest.raises(ValueError, match="token table must be contiguous"):
            check_tokens(np.zeros((3, 2), np.int32).T, LAYOUT, num_gpu_blocks=1, num_host_blocks=1)


def test_the_number_of_groups_is_bounded_by_limit_and_need() -> None:
    assert token_geometry(LAYOUT, 1, 0, 0, max_groups=64).num_groups == LAYOUT.num_layers
    assert token_geometry(LAYOUT, 1000, 0, 0, max_groups=64).num_groups == 64


class TestReference:
    @pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
    def test_all_tokens_of_a_block_are_what_the_cpu_backend_stores(self, case: Case) -> None:
        (rng,) = seeds(1)
        gpu, whole = random_pool(case.layout, 4, rng), poisoned_pool(case.layout, 5)
        backend = CpuCopyBackend(gpu.numpy(), whole.numpy())
        backend.submit_stores([BlockStore(source=GpuBlockId(2), target=HostBlockId(3))])
        backend.wait()
        backend.close()
        single = poisoned_pool(case.layout, 5)
        tokens = torch.tensor([(2, slot, 3) for slot in range(case.layout.block_tokens)])
        kernel_reference.offload_tokens(gpu, single, case.layout, tokens)
        views = (layer_views(pool, case.layout, torch.uint8) for pool in (whole, single))
        for by_block, by_token in zip(*views, strict=True):
            assert torch.equal(by_block, by_token)

    def test_pads_are_not_written(self) -> None:
        padded = next(case for case in CASES if case.name == "padded")
        assert padded.layout.layer_stride_bytes > padded.layout.layer_bytes
        (rng,) = seeds(1)
        host = poisoned_pool(padded.layout, 2)
        tokens = torch.tensor([(0, slot, 1) for slot in range(padded.layout.block_tokens)])
        kernel_reference.offload_tokens(random_pool(padded.layout, 1, rng), host, padded.layout, tokens)
        pad = host[1, padded.layout.layer_bytes : padded.layout.layer_stride_bytes]
        assert (pad == POISON).all()


class TestViews:
    @pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
    def test_views_of_a_pool_are_described_as_its_layout(self, case: Case) -> None:
        (rng,) = seeds(1)
        pool = random_pool(case.layout, 3, rng)
        views = layer_views(pool, case.layout, case.dtype)
        layout, rows = describe_layers({str(index): view for index, view in enumerate(views)})
        assert layout == case.layout
        assert torch.equal(rows, pool)
        assert rows.data_ptr() == pool.data_ptr()

    def test_a_pool_whose_last_pad_is_missing_is_refused(self) -> None:
        padded = next(case for case in CASES if case.name == "padded")
        layout = padded.layout
        missing = layout.block_bytes - (layout.num_layers * layout.layer_stride_bytes)
        assert missing > 0
        memory = torch.zeros(2 * layout.block_bytes - missing, dtype=torch.uint8)
        shape = (2, layout.num_kv_heads, layout.block_tokens, layout.content_bytes)
        stride = (layout.block_bytes, layout.head_bytes, layout.content_bytes, 1)
        layers = {
            str(layer): memory.as_strided(shape, stride, layer * layout.layer_stride_bytes)
            for layer in range(layout.num_layers)
        }
        with pytest.raises(ValueError, match="2 blocks of 3,456 need 6,912"):
            describe_layers(layers)

    def test_values_that_do_not_fit_are_refused(self) -> None:
        odd = next(case for case in CASES if case.name == "words of 1")
        with pytest.raises(ValueError, match="do not fit"):
            layer_views(poisoned_pool(odd.layout, 1), odd.layout, torch.float32)
        with pytest.raises(ValueError, match="a pool of this layout is bytes"):
            layer_views(poisoned_pool(LAYOUT, 1), odd.layout, torch.uint8)

    def test_overlapping_layers_are_refused(self) -> None:
        with pytest.raises(ValueError, match="overlap"):
            replace(LAYOUT, layer_stride_bytes=LAYOUT.layer_bytes - 1)
        with pytest.raises(ValueError, match="overlap"):
            replace(LAYOUT, block_bytes=LAYOUT.block_bytes - 1)

    def test_other_dtypes_are_refused(self) -> None:
        with pytest.raises(ValueError, match="float64 are not supported; bfloat16, float16"):
            describe_layers({"layer": torch.zeros(1, 1, 1, 2, dtype=torch.float64)})
