"""The copy calls behind ``prefetch.Mover``: CUDA's two on a GPU, memcpy on a CPU."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from lab.bench.stage.pools import PoolPlan
from lab.bench.stage.prefetch import Call, Moved, Mover
from pipemax.domain.units import GpuBlockId, HostBlockId
from pipemax.transfer.commands import BlockPrefetch
from pipemax.transfer.cpu import CpuCopyBackend, HostPool
from pipemax.transfer.cuda.device import Copy, Lane, Pool, Span


@contextmanager
def open_mover(plan: PoolPlan, device: torch.device) -> Iterator[Mover]:
    """Open two pools of the plan's size, and yield what moves parts between them."""
    gpu_rows = torch.zeros(plan.part.pool_shape(plan.gpu_parts), dtype=torch.uint8, device=device)
    if device.type != "cuda":
        host = HostPool(plan.part, plan.host_parts)
        backend = CpuCopyBackend(gpu_rows.numpy(), host.rows)
        try:
            yield CpuMover(backend)
        finally:
            backend.close()
        return
    from pipemax.transfer.cuda.cuda_device import CudaHostRegistry  # needs cuda-core
    from pipemax.transfer.cuda.numa import numa_node_of_gpu
    from pipemax.transfer.cuda.pinned_pool import PinnedHostPool

    pool = PinnedHostPool(plan.part, plan.host_parts, CudaHostRegistry(), numa_node=numa_node_of_gpu(device))
    try:
        yield CudaMover(plan, gpu_rows, pool.tensor, pool.piece_blocks)
    finally:
        torch.cuda.synchronize(device)
        pool.close()


class CpuMover:
    calls = (Call.CPU,)

    def __init__(self, backend: CpuCopyBackend) -> None:
        self._backend = backend

    def prefetch(self, pairs: list[tuple[int, int]], call: Call) -> Moved:
        begin_s = time.perf_counter()
        self._backend.submit_prefetches([BlockPrefetch(HostBlockId(s), GpuBlockId(t)) for s, t in pairs])
        submit_s = time.perf_counter() - begin_s
        self._backend.wait()
        return Moved(device_s=time.perf_counter() - begin_s, submit_s=submit_s)


class CudaMover:
    """Moves parts on the prefetch lane, with nothing else running."""

    def __init__(
        self, plan: PoolPlan, gpu_rows: torch.Tensor, host_rows: torch.Tensor, piece_blocks: int
    ) -> None:
        from pipemax.transfer.cuda.cuda_device import CopyCall, CudaDevice, best_copy_call

        self._part_bytes = plan.part.block_bytes
        has_batch = best_copy_call() is CopyCall.BATCH
        names = {Call.SINGLE: CopyCall.SINGLE, **({Call.BATCH: CopyCall.BATCH} if has_batch else {})}
        self._devices = {
            call: CudaDevice(
                gpu_rows, host_rows, host_piece_bytes=piece_blocks * self._part_bytes, copy_call=copy_call
            )
            for call, copy_call in names.items()
        }
        self.calls = tuple(names)

    def prefetch(self, pairs: list[tuple[int, int]], call: Call) -> Moved:
        size, device = self._part_bytes, self._devices[call]
        copies = [
            Copy(Span(Pool.HOST, source * size, size), Span(Pool.GPU, target * size, size))
            for source, target in pairs
        ]
        begin = device.record(Lane.PREFETCH)
        begin_s = time.perf_counter()
        device.copy(Lane.PREFETCH, copies)
        submit_s = time.perf_counter() - begin_s
        end = device.record(Lane.PREFETCH)
        device.synchronize()
        return Moved(device_s=device.elapsed_s(begin, end), submit_s=submit_s)
