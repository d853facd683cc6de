"""PipeMax's GPU worker with one planted fault, to show that a comparison of tokens sees such a fault.

The environment says which: ``FAULT``, in every ``FAULT_EVERY``-th call.

swap        the first and the last block of a call's prefetches change places
drop_store  the first of a step's stores of single tokens is left out: its replica keeps what was there before
"""

import os
from collections.abc import Sequence
from itertools import count

import numpy as np

from pipemax.transfer.commands import BlockPrefetch, CopyRows, TokenStore
from pipemax.transfer.cuda.transfers import CudaTransfers
from pipemax.vllm_ext.worker.gpu_worker import PipeMaxGpuWorker

FAULT = os.environ.get("FAULT", "swap")
EVERY = int(os.environ.get("FAULT_EVERY", "10"))
_calls = count(1)
_submit_prefetches, _store_tokens = CudaTransfers._submit_prefetches, CudaTransfers._store_tokens


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


def _dropped_store(self: CudaTransfers, stores: Sequence[TokenStore]) -> None:
    if _is_faulty("drop_store", stores):
        stores = CopyRows(TokenStore, np.array(stores, dtype=np.int32)[1:])
    _store_tokens(self, stores)


CudaTransfers._submit_prefetches = _swapped_prefetches
CudaTransfers._store_tokens = _dropped_store


class FaultyWorker(PipeMaxGpuWorker):
    """A stage whose copies are wrong now and then."""
