"""A stage's real transfers on the device of its pool: CUDA's streams, or the CPU backend's thread."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from lab.bench.stage.pools import PoolPlan
from pipemax.transfer.backend import StepTransfers
from pipemax.transfer.commands import BlockStore, StepCopies
from pipemax.transfer.cpu import CpuCopyBackend, HostPool
from pipemax.transfer.orchestrator import Orchestrator


@contextmanager
def stage_transfers(
    plan: PoolPlan, gpu_rows: torch.Tensor
) -> Iterator[tuple[StepTransfers, torch.Tensor | None]]:
    """Open the transfers; yield them, and on a CPU also the host pool's rows for comparison."""
    if gpu_rows.is_cuda:
        from pipemax.transfer.cuda.assemble import cuda_transfers  # needs cuda-core

        with cuda_transfers(plan.part, gpu_rows, plan.host_parts) as transfers:
            yield transfers, None
        return
    pool = HostPool(plan.part, plan.host_parts)
    orchestrator = Orchestrator(CpuCopyBackend(gpu_rows.numpy(), pool.rows))
    try:
        yield orchestrator, pool.tensor
    finally:
        orchestrator.close()


def copies_for(plan: PoolPlan, copies: StepCopies, *, stores_tokens: bool) -> StepCopies:
    """Return a step's block copies as copies of the pools' parts; the CPU backend stores only whole blocks."""
    token_stores, stores = copies.token_stores, copies.stores
    if not stores_tokens:
        stores = [*stores, *(BlockStore(store.source, store.target) for store in token_stores)]
        token_stores = ()
    return StepCopies(
        saves=plan.stores(copies.saves),
        prefetches=plan.prefetches(copies.prefetches),
        later_prefetches=plan.prefetches(copies.later_prefetches),
        abandons_prefetches=copies.abandons_prefetches,
        stores=plan.stores(stores),
        token_stores=plan.token_stores(token_stores),
        store_fence=copies.store_fence,
        prefetch_fence=copies.prefetch_fence,
    )
