"""A stand-in for activations: how long a host-staged copy of their size takes while prefetches load the link.

One GPU has no peer to send to, so the activation goes to pinned host memory and back on a stream of its own. All
prefetches are submitted beforehand in one call, as in an engine. CUDA only: a CPU has no copy engine.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

import torch

from lab.bench.stage.pools import PoolPlan
from pipemax.transfer.cuda.copy_runs import copy_runs
from pipemax.transfer.cuda.device import Lane

if TYPE_CHECKING:
    from pipemax.transfer.cuda.cuda_device import CudaDevice


@dataclass(frozen=True, slots=True, kw_only=True)
class PriorityRow:
    """With or without prefetches."""

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
    repeats: int,
) -> list[PriorityRow]:
    """Measure with an idle link first, then next to prefetches."""
    from pipemax.transfer.cuda.cuda_device import CudaDevice  # needs cuda-bindings

    device = CudaDevice(gpu_rows, host_rows, host_piece_bytes=piece_blocks * plan.block.block_bytes)
    bench = _Bench(plan, device, gpu_rows.device, activation_bytes, prefetch_blocks, repeats)
    idle = bench.measure("none: the link is idle", prefetches=False, idle_s=None)
    return [idle, bench.measure("in full progress", prefetches=True, idle_s=idle.median_us / 1e6)]


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

    def measure(self, name: str, *, prefetches: bool, idle_s: float | None) -> PriorityRow:
        latencies, rates = [], []
        for repeat in range(self._repeats + 1):
            torch.cuda.synchronize()
            with self._prefetching() if prefetches else nullcontext():
                latency_s = self._send()
            if repeat:
                latencies.append(latency_s)
                rates.append(self._rate if prefetches else 0.0)
        return PriorityRow(
            prefetch=name,
            activation_mib=len(self._there) / 2**20,
            median_us=median(latencies) * 1e6,
            worst_us=max(latencies) * 1e6,
            over_idle=median(latencies) / idle_s if idle_s else 1.0,
            prefetch_gb_per_s=median(rates),
        )

    @contextmanager
    def _prefetching(self) -> Iterator[None]:
        size = self._plan.block.block_bytes
        pairs = [(2 * block, 2 * block) for block in range(self._prefetch_blocks)]
        begin = self._device.record(Lane.PREFETCH)
        self._device.copy(Lane.PREFETCH, copy_runs(pairs, lane=Lane.PREFETCH, block_bytes=size))
        end = self._device.record(Lane.PREFETCH)
        time.sleep(2e-3)  # so that the prefetches are in full progress
        yield
        self._device.synchronize()
        self._rate = self._prefetch_blocks * size / self._device.elapsed_s(begin, end) / 1e9

    def _send(self) -> float:
        """Send to the host and back; return the seconds by the wall clock, which the next stage would wait."""
        begin_s = time.perf_counter()
        end = torch.cuda.Event()
        with torch.cuda.stream(self._stream):
            self._there.copy_(self._sent, non_blocking=True)
            self._received.copy_(self._there, non_blocking=True)
            end.record()
        end.synchronize()
        return time.perf_counter() - begin_s
