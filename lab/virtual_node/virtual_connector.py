"""PipeMax's own connector on a stage of a virtual node.

It is the connector of a GPU's worker with the transfers of a GPU (``CudaTransfers``), over a device that only takes
time. Only what the real one gets from CUDA and from vLLM's process groups is given to it instead.
"""

from collections.abc import Sequence
from functools import partial

import numpy as np
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.kv_cache_interface import KVCacheConfig

from lab.virtual_node.virtual_device import TokenStoreKernel, VirtualDevice
from pipemax.transfer.commands import TokenStore
from pipemax.transfer.cuda.device import KernelCall
from pipemax.transfer.cuda.launch_checks import token_table
from pipemax.transfer.cuda.transfers import CudaTransfers
from pipemax.transfer.layout import BlockLayout
from pipemax.vllm_ext.worker.connector import PipeMaxConnector
from pipemax.vllm_ext.worker.stage_clock import GpuStageClock


class VirtualConnector(PipeMaxConnector):
    """The worker's side of one stage."""

    transfers_class = CudaTransfers
    """Tests put faulty ones here."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        kv_cache_config: KVCacheConfig,
        *,
        stage: int,
        device: VirtualDevice,
        layout: BlockLayout,
    ) -> None:
        super().__init__(vllm_config, KVConnectorRole.WORKER, kv_cache_config)
        self._number = stage
        self._transfers = self.transfers_class(
            device, block_bytes=layout.block_bytes, make_token_store=partial(_token_store, layout)
        )
        self._clock = self.gpu_clock = GpuStageClock(device)

    def _place(self) -> tuple[int, Sequence[int]]:
        """Return the stage and all its ranks: the GPUs of a virtual stage do everything together."""
        return self._number, range(self._vllm_config.parallel_config.tensor_parallel_size)


def _token_store(layout: BlockLayout, stores: Sequence[TokenStore]) -> tuple[KernelCall, int]:
    rows = np.asarray(stores, dtype=np.int32).reshape(-1, 4)
    num_bytes = len(token_table(stores)) * layout.token_bytes
    return TokenStoreKernel(stores=rows, num_bytes=num_bytes), num_bytes
