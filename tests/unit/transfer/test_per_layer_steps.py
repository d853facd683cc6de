"""New KV that leaves layer by layer is in the host pool whenever another copy needs it, on whatever schedule."""

import random
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import pytest
import torch

from pipemax.domain.errors import TransferError
from pipemax.domain.units import GpuBlockId, HostBlockId
from pipemax.transfer.commands import BlockPrefetch, BlockStore, CopyCounts, StepCopies, TokenStore
from pipemax.transfer.cpu import CpuCopyBackend
from pipemax.transfer.layout import compact_layout, layer_indexes
from pipemax.transfer.orchestrator import Orchestrator
from pipemax.transfer.packing import PackingThread
from pipemax.transfer.per_layer import PerLayerOffload
from pipemax.transfer.per_layer_steps import PerLayerSteps
from tests.fakes.kv_schedule import BLOCK_TOKENS, RandomSchedule
from tests.fakes.kv_stage import GPU_BLOCKS, HOST_BLOCKS, KvModel

LAYOUT = compact_layout(num_layers=2, num_kv_heads=2, block_tokens=BLOCK_TOKENS, content_bytes=8)
LAYERS = range(LAYOUT.num_layers)


class Pools:
    """Both full of ones where nothing was written."""

    def __init__(self, gpu_blocks: int, host_blocks: int) -> None:
        self.gpu = torch.full(LAYOUT.pool_shape(gpu_blocks), 0xFF, dtype=torch.uint8)
        self.host = torch.full(LAYOUT.pool_shape(host_blocks), 0xFF, dtype=torch.uint8)


@contextmanager
def steps_over(
    pools: Pools,
    *,
    max_tokens: int,
    steps_in_flight: int = 1,
    steps_type: type[PerLayerSteps] = PerLayerSteps,
) -> Iterator[PerLayerSteps]:
    inner = Orchestrator(CpuCopyBackend(pools.gpu.numpy(), pools.host.numpy()))
    steps = steps_type(
        inner, LAYOUT, pools.gpu, pools.host, max_tokens=max_tokens, steps_in_flight=steps_in_flight
    )
    try:
        yield steps
    finally:
        steps.close()
        inner.close()


class _SlowStaging(PerLayerOffload):
    """Its copies are not done for a while, as on a GPU that is behind."""

    seconds = 0.1

    def wait(self) -> None:
        time.sleep(self.seconds)


class _BehindStaging(_SlowStaging):
    seconds = 0.001  # a few of this test's steps


class _SlowSteps(PerLayerSteps):
    staging_type: type[PerLayerOffload] = _SlowStaging

    def _make_staging(self, stream: torch.cuda.Stream | None) -> PerLayerOffload:
        return self.staging_type(self._layout, torch.uint8, max_tokens=self._max_tokens, stream=stream)


class _BehindSteps(_SlowSteps):
    staging_type = _BehindStaging


class _HastyPacking(PackingThread):
    def wait_for(self, host_blocks: Iterable[HostBlockId]) -> None:
        """Not at all."""


class _HastySteps(_BehindSteps):
    packing_type = _HastyPacking


@pytest.mark.parametrize("max_tokens", [4, 16, 256])
@pytest.mark.parametrize("seed", range(3))
def test_no_step_reads_wrong_kv(seed: int, max_tokens: int) -> None:
    """Blocks of both pools change owners; with little staging most whole blocks go after the step."""
    model, schedule, counts = _run(seed, max_tokens=max_tokens, steps_type=_BehindSteps)
    assert model.num_wrong == 0
    assert schedule.num_prefetched > 20
    assert 0 < counts.packed_bytes <= counts.stored_bytes
    assert (counts.packed_bytes < counts.stored_bytes / 2) == (max_tokens == BLOCK_TOKENS)


def _run(
    seed: int, *, max_tokens: int, steps_type: type[PerLayerSteps]
) -> tuple[KvModel, RandomSchedule, CopyCounts]:
    pools = Pools(GPU_BLOCKS, HOST_BLOCKS)
    schedule = RandomSchedule(
        random.Random(seed), gpu_blocks=GPU_BLOCKS, host_blocks=HOST_BLOCKS, writes_through=False
    )
    model = KvModel(pools.gpu, LAYOUT)
    with steps_over(pools, max_tokens=max_tokens, steps_in_flight=6, steps_type=steps_type) as steps:
        for _ in range(150):
            step = schedule.next_step()
            steps.begin_step(step.copies)
            steps.start_prefetches(step.copies)
            for run in step.runs:
                model.step(run).launch(0)
            for layer in LAYERS:
                steps.save_layer(layer)
            steps.end_step(step.copies)
        return model, schedule, steps.counts


@pytest.mark.parametrize("seed", range(3))
def test_without_waiting_for_packing_steps_read_wrong_kv(seed: int) -> None:
    """The control of the test above."""
    assert _run(seed, max_tokens=256, steps_type=_HastySteps)[0].num_wrong > 0


@pytest.fixture
def pools() -> Pools:
    pools = Pools(4, 4)
    pools.gpu[:] = torch.arange(pools.gpu.numel()).view_as(pools.gpu)
    return pools


def store(gpu: int, host: int) -> StepCopies:
    return StepCopies(stores=(BlockStore(source=GpuBlockId(gpu), target=HostBlockId(host)),))


def run_step(steps: PerLayerSteps, copies: StepCopies, layers: range = LAYERS) -> None:
    steps.begin_step(copies)
    steps.start_prefetches(copies)
    for layer in layers:
        steps.save_layer(layer)
    steps.end_step(copies)


def test_a_layer_is_copied_when_it_is_saved_and_not_later(pools: Pools) -> None:
    expected = pools.gpu[1].clone()
    with steps_over(pools, max_tokens=BLOCK_TOKENS) as steps:
        steps.begin_step(store(1, 3))
        for layer in LAYERS:
            steps.save_layer(layer)
            begin = layer * LAYOUT.layer_stride_bytes
            pools.gpu[1, begin : begin + LAYOUT.layer_bytes] = 0
        steps.end_step(store(1, 3))
    assert torch.equal(pools.host[3], expected)
    assert (pools.host[:3] == 0xFF).all()


def test_single_tokens_are_put_into_their_slots(pools: Pools) -> None:
    token = TokenStore(GpuBlockId(2), HostBlockId(0), first_slot=1, num_slots=2)
    with steps_over(pools, max_tokens=8) as steps:
        run_step(steps, StepCopies(token_stores=(token,)))
    shape = (LAYOUT.num_layers, LAYOUT.num_kv_heads, BLOCK_TOKENS, LAYOUT.content_bytes)
    host, gpu = pools.host[0].view(shape), pools.gpu[2].view(shape)
    assert torch.equal(host[:, :, 1:3], gpu[:, :, 1:3])
    assert (host[:, :, [0, 3]] == 0xFF).all()


@pytest.mark.parametrize(
    "needing",
    [
        StepCopies(prefetches=(BlockPrefetch(HostBlockId(3), GpuBlockId(0)),)),
        StepCopies(later_prefetches=(BlockPrefetch(HostBlockId(3), GpuBlockId(0)),)),
        StepCopies(saves=(BlockStore(GpuBlockId(0), HostBlockId(3)),)),
    ],
    ids=["prefetch", "later prefetch", "save"],
)
def test_a_copy_of_a_block_waits_until_that_is_packed(pools: Pools, needing: StepCopies) -> None:
    expected = pools.gpu[0 if needing.saves else 1].clone()  # what it is packed with, or saved over that
    with steps_over(pools, max_tokens=8, steps_in_flight=2, steps_type=_SlowSteps) as steps:
        run_step(steps, store(1, 3))
        steps.begin_step(needing)
        steps.start_prefetches(needing)
        assert torch.equal(pools.host[3], expected)
        steps.end_step(needing)
    assert torch.equal(pools.host[3], expected)


def test_staging_in_use_is_waited_for(pools: Pools) -> None:
    with steps_over(pools, max_tokens=8, steps_in_flight=1, steps_type=_SlowSteps) as steps:
        for block in range(4):
            run_step(steps, store(block, block))
    assert torch.equal(pools.host, pools.gpu)


def test_layers_that_were_bypassed_end_the_step(pools: Pools) -> None:
    with (
        steps_over(pools, max_tokens=8) as steps,
        pytest.raises(TransferError, match=r"only 1 of 2 layers told of their new KV.*PIECEWISE"),
    ):
        run_step(steps, store(1, 3), layers=range(1))


def test_a_failure_of_the_thread_is_raised_at_the_next_step(pools: Pools) -> None:
    with steps_over(pools, max_tokens=8) as steps:
        steps.begin_step(store(1, 3))
        steps.save_layer(0)
        steps.save_layer(1)
        steps._tokens = steps._tokens[:2]
        steps.end_step(store(1, 3))
        with pytest.raises(TransferError, match=r"could not be put into its blocks.*the table is \(2, 3\)"):
            run_step(steps, StepCopies(prefetches=(BlockPrefetch(HostBlockId(3), GpuBlockId(0)),)))


@pytest.mark.parametrize(
    ("gpu", "host", "message"), [(4, 0, "GPU block 4 is not in"), (0, 9, "host block 9 is not in")]
)
def test_blocks_outside_a_pool_are_refused(pools: Pools, gpu: int, host: int, message: str) -> None:
    with steps_over(pools, max_tokens=8) as steps, pytest.raises(ValueError, match=message):
        steps.begin_step(store(gpu, host))


def test_layers_are_numbered_as_they_lie() -> None:
    kv = torch.zeros(3, 2, 1, 4, 6)
    assert layer_indexes({"b": kv[:, 1], "a": kv[:, 0]}) == {"a": 0, "b": 1}
