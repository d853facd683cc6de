"""PipeMax's GPU worker with one planted fault, to show that a comparison of tokens sees such a fault.

The environment says which: ``FAULT``, in every ``FAULT_EVERY``-th call.

swap        the first and the last block of a call's prefetches change places
drop_store  the first of a step's stores of single tokens is left out: its replica keeps what was there before
early       what a wave copies into a group of layers also goes into the next group, which is not computed yet
"""

import os
from collections.abc import Sequence
from itertools import count

import numpy as np

from pipemax.transfer.commands import BlockPrefetch, CopyRows, StepCopies, TokenStore
from pipemax.transfer.cuda.copy_runs import part_copies
from pipemax.transfer.cuda.device import Fence, Lane
from pipemax.transfer.cuda.transfers import CudaTransfers
from pipemax.vllm_ext.worker.gpu_worker import PipeMaxGpuWorker

FAULT = os.environ.get("FAULT", "swap")
EVERY = int(os.environ.get("FAULT_EVERY", "10"))
_calls = count(1)
_submit_prefetches, _store_tokens = CudaTransfers._submit_prefetches, CudaTransfers._store_tokens
_end_group = CudaTransfers.end_group


def _is_faulty(fault: str, copies: Sequence[object]) -> bool:
    if fault != FAULT or len(copies) < 2:
        return False
    number = next(_calls)
    if number == EVERY:
        print(f"the first {FAULT} is planted", flush=True)
    return number % EVERY == 0


def _swapped_prefetches(self: CudaTransfers, prefetches: Sequence[BlockPrefetch], *, needed_by: int) -> None:
    if _is_faulty("swap", prefetches):
        table = np.array(prefetches, dtype=np.int32)
        table[[0, -1], 0] = table[[-1, 0], 0]
        prefetches = CopyRows(BlockPrefetch, table)
    _submit_prefetches(self, prefetches, needed_by=needed_by)


def _early_group(self: CudaTransfers, copies: StepCopies, group: int) -> None:
    _end_group(self, copies, group)
    if group + 1 < len(self._groups) and _is_faulty("early", copies.wave_prefetches):
        span = self._groups[group + 1]
        runs = part_copies(copies.wave_prefetches, span, lane=Lane.PREFETCH, block_bytes=self._block_bytes)
        self._copy_to_gpu(runs)
        self.device.wait(Lane.COMPUTE, self.device.record(Lane.PREFETCH), Fence.GROUP_AFTER_WAVE)


def _dropped_store(self: CudaTransfers, stores: Sequence[TokenStore]) -> None:
    if _is_faulty("drop_store", stores):
        stores = CopyRows(TokenStore, np.array(stores, dtype=np.int32)[1:])
    _store_tokens(self, stores)


CudaTransfers._submit_prefetches = _swapped_prefetches
CudaTransfers._store_tokens = _dropped_store
CudaTransfers.end_group = _early_group


class FaultyWorker(PipeMaxGpuWorker):
    """A stage whose copies are wrong now and then."""
