"""The seam on a real GPU: bytes arrive, lanes keep their order, and the random schedules of the checker hold there."""

import random
from collections.abc import Iterator, Sequence
from functools import partial

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device, and this machine has none", allow_module_level=True)
pytest.importorskip("cuda.core", reason="cuda-core is not installed: kernels cannot be compiled")

from pipemax.domain.units import GpuBlockId, HostBlockId
from pipemax.transfer.commands import BlockPrefetch, BlockStore, StepCopies, TokenStore
from pipemax.transfer.cuda.assemble import cuda_transfers
from pipemax.transfer.cuda.copy_runs import copy_runs
from pipemax.transfer.cuda.cuda_device import CopyCall, CudaDevice, CudaHostRegistry
from pipemax.transfer.cuda.device import Fence, KernelCall, Lane
from pipemax.transfer.cuda.kernels import KvKernels
from pipemax.transfer.cuda.launch_checks import token_table
from pipemax.transfer.cuda.pieces import submit_pieces
from pipemax.transfer.cuda.pinned_pool import PinnedHostPool
from pipemax.transfer.cuda.transfers import CudaTransfers
from pipemax.transfer.layout import BlockLayout, compact_layout
from tests.fakes.kv_schedule import BLOCK_TOKENS
from tests.fakes.kv_stage import GPU_BLOCKS, HOST_BLOCKS, KvModel, KvStage

pytestmark = pytest.mark.gpu

LAYOUT = compact_layout(num_layers=2, num_kv_heads=2, block_tokens=BLOCK_TOKENS, content_bytes=64)
SLOW_CYCLES = 2_000_000
"""About a millisecond: longer than everything that must wait for it."""


def zeros_on_gpu(layout: BlockLayout, num_blocks: int) -> torch.Tensor:
    return torch.zeros(layout.pool_shape(num_blocks), dtype=torch.uint8, device="cuda:0")


@pytest.fixture
def host_pool() -> Iterator[PinnedHostPool]:
    pool = PinnedHostPool(LAYOUT, HOST_BLOCKS, CudaHostRegistry(), max_piece_bytes=4 * LAYOUT.block_bytes)
    assert pool.start_up.num_pieces == HOST_BLOCKS // 4, "copies over pieces' borders are to be tested"
    yield pool
    torch.cuda.synchronize()
    pool.close()


@pytest.fixture
def gpu_rows() -> torch.Tensor:
    return zeros_on_gpu(LAYOUT, GPU_BLOCKS)


def make_device(
    gpu_rows: torch.Tensor, host_pool: PinnedHostPool, call: CopyCall | None = None
) -> CudaDevice:
    piece_bytes = host_pool.piece_blocks * LAYOUT.block_bytes
    return CudaDevice(gpu_rows, host_pool.tensor, host_piece_bytes=piece_bytes, copy_call=call)


@pytest.mark.parametrize("call", CopyCall)
def test_blocks_are_prefetched_as_they_were_stored(
    gpu_rows: torch.Tensor, host_pool: PinnedHostPool, call: CopyCall
) -> None:
    device = make_device(gpu_rows, host_pool, call)
    gpu_rows.random_(0, 256)
    original = gpu_rows.clone()
    torch.cuda.synchronize()
    pairs = [(block, block + 3) for block in range(10)] + [(20, 39), (15, 17)]
    device.copy(Lane.STORE, copy_runs(pairs, lane=Lane.STORE, block_bytes=LAYOUT.block_bytes))
    device.synchronize()
    gpu_rows.zero_()
    torch.cuda.synchronize()
    back = [(host, gpu) for gpu, host in pairs]
    device.copy(Lane.PREFETCH, copy_runs(back, lane=Lane.PREFETCH, block_bytes=LAYOUT.block_bytes))
    device.synchronize()
    blocks = [gpu for gpu, _ in pairs]
    assert torch.equal(gpu_rows[blocks], original[blocks])
    others = [block for block in range(GPU_BLOCKS) if block not in blocks]
    assert not gpu_rows[others].any()


def test_events_are_done_in_their_lanes_order(gpu_rows: torch.Tensor, host_pool: PinnedHostPool) -> None:
    device = make_device(gpu_rows, host_pool)
    begin = device.record(Lane.COMPUTE)
    torch.cuda._sleep(20 * SLOW_CYCLES)
    end = device.record(Lane.COMPUTE)
    assert not device.is_done(end)
    device.wait(Lane.PREFETCH, end, Fence.PREFETCH_AFTER_COMPUTE)
    behind = device.record(Lane.PREFETCH)
    assert not device.is_done(behind)
    device.synchronize()
    assert device.is_done(behind)
    assert device.elapsed_s(begin, end) > 0


def test_a_prefetch_without_its_fence_arrives_too_early(
    gpu_rows: torch.Tensor, host_pool: PinnedHostPool
) -> None:
    """The control of the test below: on this device, wrong order shows."""
    device = make_device(gpu_rows, host_pool)
    host_pool.tensor.fill_(7)
    gpu_rows[0] += 1  # loads the kernel: at its first launch the driver may wait for all that runs
    prefetch = copy_runs([(0, 0)], lane=Lane.PREFETCH, block_bytes=LAYOUT.block_bytes)
    for is_fenced in (False, True):
        gpu_rows.zero_()
        torch.cuda.synchronize()
        torch.cuda._sleep(20 * SLOW_CYCLES)
        gpu_rows[0] += 1
        if is_fenced:
            device.wait(Lane.PREFETCH, device.record(Lane.COMPUTE), Fence.PREFETCH_AFTER_COMPUTE)
        device.copy(Lane.PREFETCH, prefetch)
        torch.cuda.synchronize()
        assert bool((gpu_rows[0] == 7).all()) == is_fenced


def test_pieces_arrive_in_their_lane_s_order(gpu_rows: torch.Tensor, host_pool: PinnedHostPool) -> None:
    device = make_device(gpu_rows, host_pool)
    host_pool.tensor[:20] = torch.arange(1, 21, dtype=torch.uint8)[:, None]
    torch.cuda._sleep(20 * SLOW_CYCLES)
    device.wait(Lane.PREFETCH, device.record(Lane.COMPUTE), Fence.PREFETCH_AFTER_COMPUTE)
    for shift in range(4):  # each overwrites what the one before copied
        pairs = [((block + shift) % 20, block) for block in range(0, 20, 2)]
        runs = copy_runs(pairs, lane=Lane.PREFETCH, block_bytes=LAYOUT.block_bytes)
        submit_pieces(device, runs, 3 * LAYOUT.block_bytes)
    ended = device.record(Lane.PREFETCH)
    assert not device.is_done(ended)
    device.synchronize()
    assert gpu_rows[:20:2, 0].tolist() == [(block + 3) % 20 + 1 for block in range(0, 20, 2)]


def slow_some_lane_down(device: CudaDevice, rng: random.Random) -> None:
    with torch.cuda.stream(device.stream(rng.choice(list(Lane)))):
        torch.cuda._sleep(rng.randint(0, SLOW_CYCLES // 4))


@pytest.mark.parametrize("call", CopyCall)
@pytest.mark.parametrize("writes_through", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_random_schedules_read_what_was_computed(
    gpu_rows: torch.Tensor, host_pool: PinnedHostPool, call: CopyCall, writes_through: bool, seed: int
) -> None:
    rng = random.Random(seed)
    device = make_device(gpu_rows, host_pool, call)
    kernels = KvKernels(gpu_rows.device)

    def make_token_store(stores: Sequence[TokenStore]) -> tuple[KernelCall, int]:
        tokens = token_table(stores)
        return kernels.offload_tokens(gpu_rows, host_pool.tensor, LAYOUT, tokens), len(tokens)

    stage = KvStage(
        rng,
        device,
        KvModel(gpu_rows, LAYOUT),
        layout=LAYOUT,
        make_token_store=make_token_store,
        writes_through=writes_through,
        piece_bytes=3 * LAYOUT.block_bytes if seed % 2 else None,
        go_on=partial(slow_some_lane_down, device, rng),
    )
    stage.run(150)
    stage.transfers.close()
    torch.cuda.synchronize()
    assert stage.num_wrong == 0
    assert stage.schedule.num_prefetched > 20


@pytest.mark.parametrize("in_pieces", [False, True])
def test_what_start_puts_together_moves_blocks(in_pieces: bool) -> None:
    gpu_rows = zeros_on_gpu(LAYOUT, GPU_BLOCKS)
    with cuda_transfers(LAYOUT, gpu_rows, HOST_BLOCKS, in_pieces=in_pieces) as transfers:
        gpu_rows[3].fill_(9)
        assert isinstance(transfers, CudaTransfers)
        save = BlockStore(source=GpuBlockId(3), target=HostBlockId(30))
        transfers.begin_step(StepCopies(saves=(save,)))
        transfers.end_step(StepCopies())
        copies = StepCopies(prefetches=(BlockPrefetch(source=HostBlockId(30), target=GpuBlockId(4)),))
        transfers.begin_step(copies)
        transfers.start_prefetches(copies)
        transfers.end_step(StepCopies())
        transfers.begin_step(StepCopies())
        assert bool((gpu_rows[4] == 9).all())
        transfers.end_step(StepCopies())
