"""A stage's host pool in pageable memory, and the copies between two such pools, on a thread of their own.

numpy moves the bytes: a block is one contiguous memcpy, outside the interpreter's lock and in one thread. torch would
start a second team of OpenMP threads on the cores of the model.
"""

import queue
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch

from pipemax.domain.errors import TransferError
from pipemax.transfer.commands import BlockPrefetch, BlockStore, CopyCounts
from pipemax.transfer.layout import BlockLayout, ByteRows, LayerSpan


class HostPool:
    """``num_blocks`` rows of bytes. Only the scheduler knows who may use which row."""

    def __init__(self, layout: BlockLayout, num_blocks: int) -> None:
        """Allocate the pool. ``ValueError`` without blocks; torch's ``RuntimeError`` if memory does not suffice."""
        if num_blocks < 1:
            raise ValueError(f"the host pool has at least 1 block, not {num_blocks}")
        self.layout = layout
        self.num_blocks = num_blocks
        self.tensor = torch.empty(layout.pool_shape(num_blocks), dtype=torch.uint8)

    @property
    def rows(self) -> ByteRows:
        """The same memory as a numpy array, ``(num_blocks, block_bytes)``."""
        rows: ByteRows = self.tensor.numpy()
        return rows


class CpuCopyBackend:
    """Implements ``CopyBackend`` where the "GPU" pool is ordinary memory too."""

    def __init__(self, gpu_rows: ByteRows, host_rows: ByteRows) -> None:
        """Start the copy thread; both pools are ``(num_blocks, block_bytes)``."""
        if gpu_rows.shape[1:] != host_rows.shape[1:]:
            raise ValueError(f"the pools' blocks differ: {gpu_rows.shape[1:]} and {host_rows.shape[1:]}")
        self._gpu = gpu_rows
        self._host = host_rows
        self._block_bytes = host_rows.shape[1]
        self.counts = CopyCounts()
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._prefetch_s: list[float] = []
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._work, name="kv-copy", daemon=True)
        self._thread.start()

    def submit_prefetches(self, prefetches: Sequence[BlockPrefetch], span: LayerSpan | None = None) -> None:
        self._jobs.put(lambda: self._prefetch(prefetches, span or LayerSpan(0, self._block_bytes)))

    def submit_stores(self, stores: Sequence[BlockStore]) -> None:
        self._jobs.put(lambda: self._store(stores))

    def wait(self) -> list[float]:
        idle = threading.Event()
        self._jobs.put(idle.set)
        while not idle.wait(timeout=1.0):
            if not self._thread.is_alive():
                raise TransferError("the copy thread ended with copies queued")
        if self._error is not None:
            raise TransferError(f"a KV copy failed: {self._error}") from self._error
        prefetch_s, self._prefetch_s = self._prefetch_s, []
        return prefetch_s

    def close(self) -> None:
        if self._thread.is_alive():
            self._jobs.put(None)
            self._thread.join()

    # Run on the copy thread.

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except Exception as error:  # raised again in wait(), where the caller can act on it
                self._error = self._error or error

    def _prefetch(self, prefetches: Sequence[BlockPrefetch], span: LayerSpan) -> None:
        begin_s = time.perf_counter()
        part = slice(span.first_byte, span.first_byte + span.num_bytes)
        for prefetch in prefetches:
            np.copyto(self._gpu[prefetch.target, part], self._host[prefetch.source, part])
        self._prefetch_s.append(time.perf_counter() - begin_s)
        self.counts += CopyCounts(loaded_bytes=len(prefetches) * span.num_bytes)

    def _store(self, stores: Sequence[BlockStore]) -> None:
        for store in stores:
            np.copyto(self._host[store.target], self._gpu[store.source])
        self.counts += CopyCounts(stored_bytes=len(stores) * self._block_bytes)
