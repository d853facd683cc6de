"""The copy calls behind ``prefetch.Mover``: CUDA's two and our kernel on a GPU, memcpy on a CPU."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from bench.stage.pools import PoolPlan
from bench.stage.prefetch import Call, Mover
from pipemax.domain.units import GpuBlockId, HostBlockId
from pipemax.transfer.commands import BlockLoad
from pipemax.transfer.cpu import CpuCopyBackend
from pipemax.transfer.cuda.device import Copy, Lane, Pool, Span
from pipemax.transfer.host_pool import HostPool


@contextmanager
def open_mover(plan: PoolPlan, device: torch.device) -> Iterator[Mover]:
    """Two pools of the plan's size and what moves parts between them."""
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

    def load(self, pairs: list[tuple[int, int]], call: Call) -> float:
        begin_s = time.perf_counter()
        self._backend.submit_loads([BlockLoad(HostBlockId(s), GpuBlockId(t)) for s, t in pairs])
        self._backend.wait()
        return time.perf_counter() - begin_s


class CudaMover:
    """On the load lane, nothing else running."""

    def __init__(
        self, plan: PoolPlan, gpu_rows: torch.Tensor, host_rows: torch.Tensor, piece_blocks: int
    ) -> None:
        from pipemax.transfer.cuda.cuda_device import CopyCall, CudaDevice, best_copy_call
        from pipemax.transfer.cuda.kernels import KvKernels

        self._part_bytes = plan.part.block_bytes
        self._gpu_rows, self._host_rows = gpu_rows, host_rows
        has_batch = best_copy_call() is CopyCall.BATCH
        names = {Call.SINGLE: CopyCall.SINGLE, **({Call.BATCH: CopyCall.BATCH} if has_batch else {})}
        self._devices = {
            call: CudaDevice(
                gpu_rows, host_rows, host_piece_bytes=piece_blocks * self._part_bytes, copy_call=copy_call
            )
            for call, copy_call in names.items()
        }
        self._kernels = KvKernels(gpu_rows.device)
        self.calls = (*names, Call.KERNEL)

    def load(self, pairs: list[tuple[int, int]], call: Call) -> float:
        size = self._part_bytes
        device = self._devices.get(call, self._devices[Call.SINGLE])
        if call is Call.KERNEL:
            pieces = np.array(pairs, dtype=np.int64) * size
            copy = self._kernels.copy_pieces(self._host_rows, self._gpu_rows, pieces, size)
            begin = device.record(Lane.LOAD)
            copy.launch(device.stream(Lane.LOAD).cuda_stream)
        else:
            copies = [
                Copy(Span(Pool.HOST, source * size, size), Span(Pool.GPU, target * size, size))
                for source, target in pairs
            ]
            begin = device.record(Lane.LOAD)
            device.copy(Lane.LOAD, copies)
        end = device.record(Lane.LOAD)
        device.synchronize()
        return device.elapsed_s(begin, end)
