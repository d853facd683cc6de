"""The check of a stage's copies passes where they are right, and names each kind of copy that is wrong."""

from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest
import torch

from pipemax.transfer.checks.copy_check import CopyCheck, check_copies
from pipemax.transfer.checks.poisoned_prefetches import NAN_BYTE, PoisonedPrefetches
from pipemax.transfer.commands import BlockPrefetch, BlockStore, StepCopies, StepWait
from pipemax.transfer.cpu import CpuCopyBackend, HostPool
from pipemax.transfer.layout import KV_DTYPES, BlockLayout, LayerSpan
from pipemax.transfer.orchestrator import Orchestrator

LAYOUT = BlockLayout(
    num_layers=2, num_kv_heads=2, block_tokens=4, content_bytes=8, layer_stride_bytes=64, block_bytes=160
)
GPU_BLOCKS, HOST_BLOCKS = 41, 64


class Backend(CpuCopyBackend):
    """Copies correctly."""


class DropsAStore(Backend):
    def submit_stores(self, stores: Sequence[BlockStore]) -> None:
        super().submit_stores(stores[1:])


class TakesTheNeighboursBlock(Backend):
    def submit_prefetches(self, prefetches: Sequence[BlockPrefetch], span: LayerSpan | None = None) -> None:
        sources = [prefetch.source for prefetch in prefetches]
        moved = zip(sources[1:] + sources[:1], prefetches, strict=True)
        super().submit_prefetches([BlockPrefetch(source, prefetch.target) for source, prefetch in moved])


class ForgetsTheLastBytes(Backend):
    def __init__(self, gpu_rows: Any, host_rows: Any) -> None:
        super().__init__(gpu_rows[:, :-8], host_rows[:, :-8])


class DamagesWhatItCopies(Backend):
    def submit_prefetches(self, prefetches: Sequence[BlockPrefetch], span: LayerSpan | None = None) -> None:
        super().submit_prefetches(prefetches)
        self.wait()
        self._gpu[prefetches[-1].target, 3] ^= 1


class StoresTooLate(Orchestrator):
    """Makes a step's stores one step later, when what they read may be overwritten."""

    def __init__(self, backend: CpuCopyBackend) -> None:
        super().__init__(backend)
        self._late: tuple[BlockStore, ...] = ()

    def end_step(self, copies: StepCopies) -> None:
        late, self._late = self._late, copies.stores
        super().end_step(replace(copies, stores=late))


class PrefetchesAtOnce(Orchestrator):
    """Does not wait for the stores of the step before."""

    def begin_step(self, copies: StepCopies) -> StepWait:
        stores, self._held = getattr(self, "_held", ()), ()
        wait = super().begin_step(copies)
        self._backend.submit_stores(stores)
        return wait

    def end_step(self, copies: StepCopies) -> None:
        super().end_step(replace(copies, stores=()))
        self._held = copies.stores


def check(backend_type: type[CpuCopyBackend], steps: type[Orchestrator] = Orchestrator) -> CopyCheck:
    gpu_rows = torch.zeros(LAYOUT.pool_shape(GPU_BLOCKS), dtype=torch.uint8)
    pool = HostPool(LAYOUT, HOST_BLOCKS)
    pool.tensor.zero_()
    with closing(steps(backend_type(gpu_rows.numpy(), pool.rows))) as transfers:
        result = check_copies(transfers, LAYOUT, gpu_rows, pool.tensor, stores_tokens=False)
    assert not gpu_rows.any(), (
        "kernels may multiply by zero what lies behind a sequence's end, and NaN stays NaN"
    )
    assert not pool.tensor.any()
    return result


def test_right_copies_pass_and_are_timed() -> None:
    result = check(Backend)
    assert not result.faults
    assert result.passed[-1] == "a damaged copy", "the check notices what is wrong"
    assert result.num_blocks == (GPU_BLOCKS - 1) // 2
    assert len(result.bytes_per_s) == 6
    assert min(result.bytes_per_s.values()) > 0
    assert CopyCheck(**result.to_values()) == result


@pytest.mark.parametrize(
    ("backend_type", "faulty"),
    [
        (DropsAStore, ["stores", "saves", "steps in flight together"]),
        (
            TakesTheNeighboursBlock,
            ["prefetches", "later prefetches", "steps in flight together", "a damaged copy"],
        ),
        (
            DamagesWhatItCopies,
            ["prefetches", "later prefetches", "steps in flight together", "a damaged copy"],
        ),
    ],
)
def test_a_wrong_copy_is_named(backend_type: type[CpuCopyBackend], faulty: list[str]) -> None:
    result = check(backend_type)
    assert [fault.partition(":")[0] for fault in result.faults] == faulty


def test_bytes_that_stay_behind_are_noticed() -> None:
    faults = check(ForgetsTheLastBytes).faults
    assert faults[0] == f"stores: {(GPU_BLOCKS - 1) // 2} of {(GPU_BLOCKS - 1) // 2} blocks differ"


@pytest.mark.parametrize("steps", [StoresTooLate, PrefetchesAtOnce])
def test_copies_in_the_wrong_order_are_noticed(steps: type[Orchestrator]) -> None:
    assert "steps in flight together" in [fault.partition(":")[0] for fault in check(Backend, steps).faults]


def test_pools_that_are_too_small_are_refused() -> None:
    gpu_rows = torch.zeros(LAYOUT.pool_shape(2), dtype=torch.uint8)
    pool = HostPool(LAYOUT, 4)
    with (
        closing(Orchestrator(Backend(gpu_rows.numpy(), pool.rows))) as transfers,
        pytest.raises(ValueError, match="pools of 2 and 4 blocks are too small"),
    ):
        check_copies(transfers, LAYOUT, gpu_rows, pool.tensor, stores_tokens=False)


class DropsPrefetches(Backend):
    def submit_prefetches(self, prefetches: Sequence[BlockPrefetch], span: LayerSpan | None = None) -> None:
        super().submit_prefetches([], span)


@pytest.mark.parametrize(("backend_type", "expected"), [(Backend, 7), (DropsPrefetches, NAN_BYTE)])
def test_a_prefetch_that_is_left_out_leaves_poison(backend_type: type[CpuCopyBackend], expected: int) -> None:
    gpu_rows = torch.full(LAYOUT.pool_shape(4), 7, dtype=torch.uint8)
    pool = HostPool(LAYOUT, 4)
    pool.tensor.fill_(1)
    saved = StepCopies(saves=(BlockStore(source=3, target=0),))  # type: ignore[arg-type]
    back = StepCopies(prefetches=(BlockPrefetch(source=0, target=2),))  # type: ignore[arg-type]
    with closing(Orchestrator(backend_type(gpu_rows.numpy(), pool.rows))) as inner:
        transfers = PoisonedPrefetches(inner, gpu_rows)
        for copies in (saved, back, StepCopies()):
            transfers.begin_step(copies)
            transfers.start_prefetches(copies)
            transfers.end_step(copies)
    assert gpu_rows[2].unique().tolist() == [expected]
    assert gpu_rows[1].unique().tolist() == [7]


@pytest.mark.parametrize(("backend_type", "expected"), [(Backend, 1), (DropsPrefetches, NAN_BYTE)])
def test_a_wave_s_poison_follows_the_computation(backend_type: type[CpuCopyBackend], expected: int) -> None:
    gpu_rows = torch.full(LAYOUT.pool_shape(4), 7, dtype=torch.uint8)
    pool = HostPool(LAYOUT, 4)
    pool.tensor.fill_(1)
    groups = LAYOUT.group_spans(2)
    copies = StepCopies(wave_prefetches=(BlockPrefetch(source=0, target=2),), in_groups=True)  # type: ignore[arg-type]
    backend = backend_type(gpu_rows.numpy(), pool.rows)
    with closing(Orchestrator(backend, groups)) as inner:
        transfers = PoisonedPrefetches(inner, gpu_rows, groups)
        transfers.begin_step(copies)
        transfers.start_prefetches(copies)
        for group, (first_byte, num_bytes) in enumerate(groups):
            transfers.begin_group(group)
            assert gpu_rows[2, first_byte:].unique().tolist() == [7]
            transfers.end_group(copies, group)
            backend.wait()
            assert gpu_rows[2, first_byte : first_byte + num_bytes].unique().tolist() == [expected]
        transfers.end_step(copies)


@pytest.mark.parametrize("dtype", [dtype for dtype in KV_DTYPES if dtype.is_floating_point], ids=str)
def test_the_poison_is_nan_in_every_type_of_kv(dtype: torch.dtype) -> None:
    poison = torch.full((dtype.itemsize,), NAN_BYTE, dtype=torch.uint8)
    assert poison.view(dtype).float().isnan().all()
