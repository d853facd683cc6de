"""A stand-in for activations: how long a host-staged copy of their size takes while prefetches load the link.

One GPU has no peer to send to, so the activation goes to pinned host memory and back on a stream of its own. All
prefetches are submitted beforehand: in one call, as in most engines; in pieces of 1 ms that give way, as in an engine
that receives by the copy engine; and in the same pieces with a kernel between two of them, in case that a mark on
another stream is not enough for the engine to turn. CUDA only: a CPU has no copy engine.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

from lab.bench.stage.pools import PoolPlan
from pipemax.transfer.cuda.copy_runs import CopyRuns, copy_runs
from pipemax.transfer.cuda.device import Lane
from pipemax.transfer.cuda.pieces import PIECE_S, cut, measure_bytes_per_s, submit_pieces

if TYPE_CHECKING:
    from pipemax.transfer.cuda.cuda_device import CudaDevice

Submit = Callable[[CopyRuns], None]
"""Enqueues prefetches on their lane."""


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
    """Measure with an idle link first, then next to prefetches, submitted in each of the ways.

    What the GPU pool's first blocks held is lost.
    """
    from pipemax.transfer.cuda.cuda_device import CudaDevice  # needs cuda-bindings

    device = CudaDevice(gpu_rows, host_rows, host_piece_bytes=piece_blocks * plan.block.block_bytes)
    bench = _Bench(plan, device, gpu_rows.device, activation_bytes, prefetch_blocks, repeats)
    timed_bytes = min(prefetch_blocks * plan.block.block_bytes, gpu_rows.numel(), host_rows.numel())
    piece_bytes = int(PIECE_S * measure_bytes_per_s(device, timed_bytes))
    idle = bench.measure("none: the link is idle", None, idle_s=None)
    ways: dict[str, Submit] = {
        "in one call": partial(device.copy, Lane.PREFETCH),
        "in pieces that give way": lambda runs: submit_pieces(device, runs, piece_bytes),
        "in pieces with a kernel between": _WithKernels(device, gpu_rows.device, piece_bytes).submit,
    }
    return [idle, *(bench.measure(name, way, idle_s=idle.median_us / 1e6) for name, way in ways.items())]


class _WithKernels:
    """Submits pieces each of which waits for a kernel behind the one before, on a stream of high priority."""

    def __init__(self, device: "CudaDevice", gpu: torch.device, piece_bytes: int) -> None:
        self._device = device
        self._piece_bytes = piece_bytes
        make_stream: Any = torch.cuda.Stream  # torch does not type it
        self._stream = make_stream(gpu, priority=-1)
        self._number = torch.zeros(1, device=gpu)

    def submit(self, runs: CopyRuns) -> None:
        lane = self._device.stream(Lane.PREFETCH)
        for piece in cut(runs, self._piece_bytes):
            self._stream.wait_event(lane.record_event())
            with torch.cuda.stream(self._stream):
                self._number.add_(1)
            lane.wait_event(self._stream.record_event())
            self._device.copy(Lane.PREFETCH, piece)


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

    def measure(self, name: str, submit: Submit | None, *, idle_s: float | None) -> PriorityRow:
        """``submit``: None leaves the link idle."""
        latencies, rates = [], []
        for repeat in range(self._repeats + 1):
            torch.cuda.synchronize()
            with self._prefetching(submit) if submit else nullcontext():
                latency_s = self._send()
            if repeat:
                latencies.append(latency_s)
                rates.append(self._rate if submit else 0.0)
        return PriorityRow(
            prefetch=name,
            activation_mib=len(self._there) / 2**20,
            median_us=median(latencies) * 1e6,
            worst_us=max(latencies) * 1e6,
            over_idle=median(latencies) / idle_s if idle_s else 1.0,
            prefetch_gb_per_s=median(rates),
        )

    @contextmanager
    def _prefetching(self, submit: Submit) -> Iterator[None]:
        size = self._plan.block.block_bytes
        pairs = [(2 * block, 2 * block) for block in range(self._prefetch_blocks)]
        begin = self._device.record(Lane.PREFETCH)
        submit(copy_runs(pairs, lane=Lane.PREFETCH, block_bytes=size))
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
