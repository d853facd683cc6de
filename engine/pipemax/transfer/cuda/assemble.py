"""Assemble one stage's transfers on its GPU: host pool, lanes and kernels."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from pipemax.domain.units import MIB
from pipemax.transfer.commands import TokenStore
from pipemax.transfer.cuda.cuda_device import CudaDevice, CudaHostRegistry
from pipemax.transfer.cuda.device import KernelCall
from pipemax.transfer.cuda.kernels import KvKernels
from pipemax.transfer.cuda.launch_checks import token_table
from pipemax.transfer.cuda.numa import numa_node_of_gpu
from pipemax.transfer.cuda.pieces import PIECE_S, measure_bytes_per_s
from pipemax.transfer.cuda.pinned_pool import PinnedHostPool
from pipemax.transfer.cuda.transfers import CudaTransfers, MakeTokenStore
from pipemax.transfer.layout import BlockLayout, LayerSpan

log = logging.getLogger(__name__)

_TIMED_BYTES = 64 * MIB
"""Of a copy that measures the link: 1 ms at 64 GB/s."""


@contextmanager
def cuda_transfers(
    layout: BlockLayout,
    gpu_rows: torch.Tensor,
    host_blocks: int,
    *,
    in_pieces: bool = False,
    groups: Sequence[LayerSpan] = (),
) -> Iterator[CudaTransfers]:
    """Make the transfers of a stage whose pool is ``gpu_rows``: ``(num_blocks, block_bytes)`` bytes on a GPU.

    ``in_pieces``: prefetches give way to what else comes by the copy engine, and the link's rate is measured for that,
    which sets the first blocks of the GPU pool to zero. ``groups``: see ``CudaTransfers``. Allocates and pins the host
    pool, which takes minutes for hundreds of GiB. ``EngineStartError`` if memory does not suffice or cannot be pinned,
    ``TransferError`` if CUDA refuses. On exit, copies are finished, the pool is unpinned.
    """
    torch.cuda.set_device(gpu_rows.device)
    pool = PinnedHostPool(
        layout, host_blocks, CudaHostRegistry(), numa_node=numa_node_of_gpu(gpu_rows.device)
    )
    try:
        device = CudaDevice(gpu_rows, pool.tensor, host_piece_bytes=pool.piece_blocks * layout.block_bytes)
        transfers = CudaTransfers(
            device,
            block_bytes=layout.block_bytes,
            make_token_store=_token_stores(layout, gpu_rows, pool),
            groups=groups,
            piece_bytes=_piece_bytes(device, gpu_rows, pool) if in_pieces else None,
        )
        try:
            yield transfers
        finally:
            transfers.close()
    finally:
        pool.close()


def _piece_bytes(device: CudaDevice, gpu_rows: torch.Tensor, pool: PinnedHostPool) -> int:
    # Nothing has been stored yet: the pool's memory is still zero.
    num_bytes = min(_TIMED_BYTES, gpu_rows.numel(), pool.tensor.numel())
    bytes_per_s = measure_bytes_per_s(device, num_bytes)
    piece_bytes = int(PIECE_S * bytes_per_s)
    log.info(
        "prefetches go in pieces of %.1f MB: the link takes %.1f GB/s", piece_bytes / 1e6, bytes_per_s / 1e9
    )
    return piece_bytes


def _token_stores(layout: BlockLayout, gpu_rows: torch.Tensor, pool: PinnedHostPool) -> MakeTokenStore:
    kernels = KvKernels(gpu_rows.device)

    def make(stores: Sequence[TokenStore]) -> tuple[KernelCall, int]:
        tokens = token_table(stores)
        call = kernels.offload_tokens(gpu_rows, pool.tensor, layout, tokens)
        return call, len(tokens) * layout.token_bytes

    return make
