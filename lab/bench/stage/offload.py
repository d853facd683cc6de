"""Measures two ways of bringing a step's new KV to the host: our kernel after the step, and whole blocks after it.

Each is measured by itself and together with the computation that should hide it (``fig:runtime`` (b)).
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from statistics import median
from typing import TYPE_CHECKING

import numpy as np
import torch

from lab.bench.stage.clock import synchronize
from lab.bench.stage.pools import PoolPlan
from pipemax.transfer.cuda.device import Copy, Lane, Pool, Span
from pipemax.transfer.cuda.launch_checks import TokenTable
from tests.gpu import kernel_reference

if TYPE_CHECKING:
    from pipemax.transfer.cuda.cuda_device import CudaDevice


_STEPS = 8
"""Consecutive steps when offload and computation are measured together."""


class Way(StrEnum):
    KERNEL = "kernel after the step"
    WHOLE_BLOCKS = "whole blocks"


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakdownRow:
    """One kind of step and one way."""

    phase: str
    size: int
    """Requests in decode; the prompts' length in prefill."""
    tokens: int
    way: str
    compute_ms: float
    offload_ms: float
    """Only offload, on the device."""
    together_ms: float
    hidden: float
    """Share of the offload that costs the step nothing."""
    moved_mib: float


class Offloader:
    """One way, for one kind of step. Pools are block-first; ``host_rows`` are pinned if the device is a GPU."""

    def __init__(
        self,
        way: Way,
        plan: PoolPlan,
        gpu_rows: torch.Tensor,
        host_rows: torch.Tensor,
        tokens: TokenTable,
    ) -> None:
        self.way = way
        self._layout = plan.block
        self._gpu_rows, self._host_rows = gpu_rows, host_rows
        self.tokens = tokens
        self._device = _cuda_device(gpu_rows, host_rows) if gpu_rows.is_cuda else None
        self._stream = self._device.stream(Lane.STORE) if self._device is not None else None
        self._done: torch.cuda.Event | None = None
        self._enqueue = self._make_enqueue()

    @property
    def moved_bytes(self) -> int:
        if self.way is Way.WHOLE_BLOCKS:
            return len(self._touched()) * self._layout.block_bytes
        return len(self.tokens) * self._layout.token_bytes

    def after_step(self) -> None:
        """Enqueue what comes after the step's last kernel."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._gpu_rows.device))
        self._enqueue()
        if self._stream is not None:
            self._done = self._stream.record_event()

    def finish(self) -> None:
        """Wait until the last step's KV has reached its blocks in the host pool."""
        if self._done is not None:
            self._done.synchronize()

    def _touched(self) -> np.ndarray:
        """Return the (GPU block, host block) pairs, each once."""
        return np.unique(self.tokens[:, [0, 2]], axis=0)

    def _make_enqueue(self) -> Callable[[], None]:
        """Return a call that enqueues the offload, checked beforehand so that only the copy is timed."""
        if self.way is Way.WHOLE_BLOCKS:
            return self._whole_blocks
        if self._stream is None:
            tokens = torch.from_numpy(self.tokens)
            return lambda: kernel_reference.offload_tokens(
                self._gpu_rows, self._host_rows, self._layout, tokens
            )
        from pipemax.transfer.cuda.kernels import KvKernels  # needs cuda-core

        stream = self._stream.cuda_stream
        call = KvKernels(self._gpu_rows.device).offload_tokens(
            self._gpu_rows, self._host_rows, self._layout, self.tokens
        )
        return lambda: call.launch(stream)

    def _whole_blocks(self) -> None:
        size, pairs = self._layout.block_bytes, self._touched().tolist()
        if self._device is None:
            for gpu, host in pairs:
                self._host_rows[host] = self._gpu_rows[gpu]
            return
        copies = [
            Copy(Span(Pool.GPU, gpu * size, size), Span(Pool.HOST, host * size, size)) for gpu, host in pairs
        ]
        self._device.copy(Lane.STORE, copies)


def _cuda_device(gpu_rows: torch.Tensor, host_rows: torch.Tensor) -> "CudaDevice":
    from pipemax.transfer.cuda.cuda_device import CudaDevice  # needs cuda-bindings

    return CudaDevice(gpu_rows, host_rows)


def measure_breakdown(
    phase: str,
    size: int,
    compute: Callable[[], None],
    offloader: Offloader,
    *,
    device: torch.device,
    repeats: int,
) -> BreakdownRow:
    """Measure computation, offload, and both together.

    ``compute`` runs one step. When both are measured together, steps follow each other, and a step's offload runs
    during the next step. Only the last offload has nothing to hide behind.
    """

    def compute_only() -> None:
        for _ in range(_STEPS):
            compute()

    def together() -> None:
        for _ in range(_STEPS):
            compute()
            offloader.after_step()
        offloader.finish()

    compute_s = _wall_s(compute_only, device, repeats) / _STEPS
    offload_s = _wall_s(offloader.after_step, device, repeats)
    together_s = _wall_s(together, device, repeats) / _STEPS
    return BreakdownRow(
        phase=phase,
        size=size,
        tokens=len(offloader.tokens),
        way=str(offloader.way),
        compute_ms=compute_s * 1e3,
        offload_ms=offload_s * 1e3,
        together_ms=together_s * 1e3,
        hidden=1 - min(1.0, max(0.0, together_s - compute_s) / offload_s),
        moved_mib=offloader.moved_bytes / 2**20,
    )


def _wall_s(work: Callable[[], None], device: torch.device, repeats: int) -> float:
    """Return the median seconds until the device is idle, after one warm-up; what a CPU does afterwards counts too."""
    seconds = []
    for repeat in range(repeats + 1):
        synchronize(device)
        begin_s = time.perf_counter()
        work()
        synchronize(device)
        if repeat:
            seconds.append(time.perf_counter() - begin_s)
    return median(seconds)
