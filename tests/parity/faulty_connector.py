"""Connectors that make hidden mistakes visible: NaN wherever nothing was written, and copies that go wrong."""

from collections.abc import Sequence

import torch

from pipemax.transfer.backend import CopyBackend
from pipemax.transfer.commands import BlockLoad, BlockStore, LoadTiming
from pipemax.transfer.cpu import CpuCopyBackend
from pipemax.transfer.host_pool import HostPool
from pipemax.transfer.layout import ByteRows
from pipemax.vllm_ext.connector import PipeMaxConnector

NAN_BYTE = 0xFF
"""All bits set is NaN in every KV dtype."""


class PoisonedConnector(PipeMaxConnector):
    """The host pool is NaN where nothing was stored, and a GPU block is NaN from when its copy is queued until it
    is done: what an eviction left behind, or a read that does not wait, cannot pass unnoticed.
    """

    def _make_backend(self, gpu_rows: torch.Tensor, pool: HostPool) -> CopyBackend:
        pool.rows[:] = NAN_BYTE
        return PoisoningBackend(gpu_rows.numpy(), pool.rows)


class PoisoningBackend(CpuCopyBackend):
    def __init__(self, gpu_rows: ByteRows, host_rows: ByteRows) -> None:
        super().__init__(gpu_rows, host_rows)
        self._gpu_rows = gpu_rows

    def submit_loads(self, loads: Sequence[BlockLoad]) -> None:
        for load in loads:
            self._gpu_rows[load.target] = NAN_BYTE
        super().submit_loads(loads)


class CorruptingConnector(PipeMaxConnector):
    """The negative control: every few loads, a block's copy comes from its neighbour's source."""

    def _make_backend(self, gpu_rows: torch.Tensor, pool: HostPool) -> CopyBackend:
        return CorruptingBackend(CpuCopyBackend(gpu_rows.numpy(), pool.rows))


class CorruptingBackend:
    EVERY = 4

    def __init__(self, backend: CopyBackend) -> None:
        self._backend = backend
        self._num_loads = 0

    def submit_loads(self, loads: Sequence[BlockLoad]) -> None:
        self._num_loads += 1
        if self._num_loads % self.EVERY == 0 and len(loads) > 1:
            sources = [load.source for load in loads]
            rotated = sources[1:] + sources[:1]
            loads = [BlockLoad(source, load.target) for source, load in zip(rotated, loads, strict=True)]
        self._backend.submit_loads(loads)

    def submit_stores(self, stores: Sequence[BlockStore]) -> None:
        self._backend.submit_stores(stores)

    def wait(self) -> list[LoadTiming]:
        return self._backend.wait()

    def close(self) -> None:
        self._backend.close()
