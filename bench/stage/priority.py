"""A stand-in for activations: how long a host-staged copy of their size takes while prefetches load the link.

One GPU has no peer to send to, so the activation goes to pinned host memory and back on a stream of its own. Without
priority, all prefetches are submitted to the device beforehand; with it, they wait in the queue, which holds them back
around the send. CUDA only: a CPU has no copy queue to wait in.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

import torch

from bench.stage.pools import PoolPlan
from pipemax.transfer.cuda.chunk_queue import ChunkQueue, CopyLimits, Priority
from pipemax.transfer.cuda.copy_chunks import copy_chunks
from pipemax.transfer.cuda.device import Lane
from pipemax.transfer.cuda.submitter import Submitter

if TYPE_CHECKING:
    from pipemax.transfer.cuda.cuda_device import CudaDevice

_NO_LIMIT = 1 << 60


@dataclass(frozen=True, slots=True, kw_only=True)
class PriorityRow:
    """One way of submitting prefetches."""

    prefetch: str
    activation_mib: float
    median_us: float
    worst_us: float
    over_idle: float
    """Median over the median of an idle link."""
    prefetch_gb_per_s: float
    """Rate of the prefetches meanwhile."""


def measure_priority(
    plan: PoolPlan,
    gpu_rows: torch.Tensor,
    host_rows: torch.Tensor,
    *,
    piece_blocks: int,
    activation_bytes: int,
    prefetch_blocks: int,
    limits: dict[str, CopyLimits],
    repeats: int,
) -> list[PriorityRow]:
    """Measure with an idle link first, then without priority, then with it under each of ``limits``."""
    from pipemax.transfer.cuda.cuda_device import CudaDevice  # needs cuda-bindings

    device = CudaDevice(gpu_rows, host_rows, host_piece_bytes=piece_blocks * plan.block.block_bytes)
    bench = _Bench(plan, device, gpu_rows.device, activation_bytes, prefetch_blocks, repeats)
    idle = bench.measure("none: the link is idle", None, holds=False, idle_s=None)
    unlimited = CopyLimits(chunk_bytes=_NO_LIMIT, in_flight_bytes=_NO_LIMIT)
    rows = [idle, bench.measure("without priority", unlimited, holds=False, idle_s=idle.median_us / 1e6)]
    for name, limit in limits.items():
        rows.append(bench.measure(f"with priority, {name}", limit, holds=True, idle_s=idle.median_us / 1e6))
    return rows


class _Bench:
    def __init__(
        self,
        plan: PoolPlan,
        device: "CudaDevice",
        gpu: torch.device,
        activation_bytes: int,
        prefetch_blocks: int,
        repeats: int,
    ) -> None:
        self._plan = plan
        self._device = device
        self._repeats = repeats
        self._prefetch_blocks = prefetch_blocks
        self._there = torch.zeros(activation_bytes, dtype=torch.uint8, pin_memory=True)
        self._sent = torch.zeros(activation_bytes, dtype=torch.uint8, device=gpu)
        self._received = torch.zeros(activation_bytes, dtype=torch.uint8, device=gpu)
        self._stream = torch.cuda.Stream(gpu)

    def measure(
        self, name: str, limits: CopyLimits | None, *, holds: bool, idle_s: float | None
    ) -> PriorityRow:
        latencies, rates = [], []
        for repeat in range(self._repeats + 1):
            torch.cuda.synchronize()
            with self._prefetching(limits) as queue:
                latency_s = self._send(queue if holds else None)
            if repeat:
                latencies.append(latency_s)
                rates.append(self._rate)
        return PriorityRow(
            prefetch=name,
            activation_mib=len(self._there) / 2**20,
            median_us=median(latencies) * 1e6,
            worst_us=max(latencies) * 1e6,
            over_idle=median(latencies) / idle_s if idle_s else 1.0,
            prefetch_gb_per_s=median(rates),
        )

    @contextmanager
    def _prefetching(self, limits: CopyLimits | None) -> Iterator[ChunkQueue | None]:
        self._rate = 0.0
        if limits is None:
            yield None
            return
        queue = ChunkQueue(self._device, limits)
        submitter = Submitter(queue)
        size = self._plan.block.block_bytes
        pairs = [(2 * block, 2 * block) for block in range(self._prefetch_blocks)]
        chunks = copy_chunks(pairs, lane=Lane.PREFETCH, block_bytes=size, chunk_bytes=limits.chunk_bytes)
        ticket = queue.put(chunks, priority=Priority.PREFETCH)
        submitter.wake()
        while ticket.begin is None:
            time.sleep(1e-5)
        time.sleep(2e-3)  # so that the prefetches are in full progress
        yield queue
        submitter.close()
        queue.flush()
        self._device.synchronize()
        assert ticket.end is not None
        num_bytes = self._prefetch_blocks * size
        self._rate = num_bytes / self._device.elapsed_s(ticket.begin, ticket.end) / 1e9

    def _send(self, queue: ChunkQueue | None) -> float:
        """Send to the host and back; return the seconds by the wall clock, which the next stage would wait."""
        begin_s = time.perf_counter()
        begin, end = torch.cuda.Event(), torch.cuda.Event()
        with torch.cuda.stream(self._stream):
            begin.record()
            self._there.copy_(self._sent, non_blocking=True)
            self._received.copy_(self._there, non_blocking=True)
            end.record()
        if queue is not None:
            queue.hold_for_send(begin, end)
        end.synchronize()
        return time.perf_counter() - begin_s
