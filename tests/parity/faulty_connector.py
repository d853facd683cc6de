"""A connector that makes hidden mistakes visible: NaN wherever nothing was written, and copies that go wrong."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from vllm.distributed.kv_transfer import get_kv_transfer_group

from pipemax.transfer.backend import CopyBackend
from pipemax.transfer.checks.poisoned_prefetches import NAN_BYTE
from pipemax.transfer.commands import BlockPrefetch
from pipemax.transfer.cpu import CpuCopyBackend, HostPool
from pipemax.transfer.cuda.device import Fence
from pipemax.transfer.layout import BlockLayout, ByteRows, LayerSpan
from pipemax.vllm_ext.worker.connector import PipeMaxConnector


class Fault(Enum):
    """How a stage's copies misbehave."""

    NONE = "none"
    POISON = "poison"
    """The host pool is NaN where nothing was stored, and a GPU block is NaN from when its copy is queued until it is
    done: what an eviction left behind, or a read that does not wait, cannot pass unnoticed."""
    LOST = "lost"
    """The negative control of the poison: every few prefetches, a block's copy is left out over it."""
    LEFT_OUT = "left out"
    """Every few prefetches, a block's copy is left out, over whatever was there before."""
    CORRUPT = "corrupt"
    """The negative control: every few prefetches, a block's copy comes from its neighbour's source."""
    EARLY = "early"
    """The negative control of waves: the copies into each group of layers but the first come one group too early."""


class FaultyConnector(PipeMaxConnector):
    def _make_backend(self, gpu_rows: torch.Tensor, pool: HostPool) -> CopyBackend:
        self.faults = FaultyBackend(gpu_rows.numpy(), pool.rows)
        return self.faults

    def begin(self, fault: Fault) -> None:
        """Begin to count the steps of another scheduler."""
        self.faults.begin(fault)
        self._clock = type(self._clock)()


class FaultyBackend(CpuCopyBackend):
    FAULT_EVERY = 4

    def __init__(self, gpu_rows: ByteRows, host_rows: ByteRows) -> None:
        super().__init__(gpu_rows, host_rows)
        self._gpu_rows = gpu_rows
        self._host_rows = host_rows
        self._num_prefetches = 0
        self._fault = Fault.NONE

    @property
    def num_host_blocks(self) -> int:
        return len(self._host_rows)

    def begin(self, fault: Fault) -> None:
        """While nothing is being copied that anybody needs."""
        self.wait()
        self._fault = fault
        self._host_rows[:] = NAN_BYTE
        self._gpu_rows[:] = 0  # of NaN that a lost copy left: CPU kernels read whole blocks

    def submit_prefetches(self, prefetches: Sequence[BlockPrefetch], span: LayerSpan | None = None) -> None:
        self._num_prefetches += 1
        begin, size = span or LayerSpan(0, self._gpu_rows.shape[1])
        match self._fault:
            case Fault.POISON:
                for prefetch in prefetches:
                    self._gpu_rows[prefetch.target, begin : begin + size] = NAN_BYTE
            case Fault.LOST if self._num_prefetches % self.FAULT_EVERY == 0:
                self._gpu_rows[prefetches[0].target] = NAN_BYTE
                prefetches = prefetches[1:]
            case Fault.LEFT_OUT if self._num_prefetches % self.FAULT_EVERY == 0:
                prefetches = prefetches[1:]
            case Fault.CORRUPT if self._num_prefetches % self.FAULT_EVERY == 0 and len(prefetches) > 1:
                sources = [prefetch.source for prefetch in prefetches]
                rotated = sources[1:] + sources[:1]
                prefetches = [
                    BlockPrefetch(source, prefetch.target)
                    for source, prefetch in zip(rotated, prefetches, strict=True)
                ]
            case Fault.EARLY if span is not None:
                following = slice(begin + size, begin + 2 * size)  # the groups are of equal size
                for prefetch in prefetches:
                    self._gpu_rows[prefetch.target, following] = self._host_rows[prefetch.source, following]
            case _:
                pass
        super().submit_prefetches(prefetches, span)


def set_fault(worker: Any, fault: Fault | Fence) -> None:
    """Called on each worker."""
    connector: Any = get_kv_transfer_group()  # one that tests make
    connector.begin(fault)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPool:
    """A worker's host pool."""

    layout: BlockLayout
    num_blocks: int


def host_pool(worker: Any) -> WorkerPool:
    """Called on each worker."""
    connector: Any = get_kv_transfer_group()
    return WorkerPool(layout=connector._stage.layout, num_blocks=len(connector._stage.host_rows))
