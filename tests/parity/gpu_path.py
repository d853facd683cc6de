"""A GPU's worker and transfers in a process that has no GPU: ``PipeMaxGpuWorker`` over vLLM's worker for CPUs.

Worker, connector, clock and transfers are those of a GPU; below them ``late_cuda`` takes the place of CUDA. Sends
between stages are vLLM's own, over gloo.
"""

from typing import Any, cast

import torch

from pipemax.transfer.cuda.cuda_device import CudaDevice
from pipemax.transfer.cuda.device import CopyDevice, DeviceEvent, Fence, Lane
from pipemax.transfer.cuda.transfers import CudaTransfers
from pipemax.transfer.layout import describe_layers
from pipemax.vllm_ext.worker.connector import PipeMaxConnector
from pipemax.vllm_ext.worker.cpu_worker import CpuStageWorker
from pipemax.vllm_ext.worker.gpu_worker import PipeMaxGpuWorker
from tests.fakes.late_cuda import POISON, OnGpu, put_in_place_of_cuda
from tests.parity.faulty_connector import Fault


class _WithoutFence:
    """A ``CopyDevice`` that leaves one fence out."""

    def __init__(self, device: CudaDevice, left_out: Fence) -> None:
        self._device = device
        self._left_out = left_out

    def wait(self, lane: Lane, event: DeviceEvent, reason: Fence) -> None:
        if reason is not self._left_out:
            self._device.wait(lane, event, reason)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)


class GpuPathWorker(PipeMaxGpuWorker, CpuStageWorker):
    """``PipeMaxGpuWorker``, whose ``super()`` is here the worker for CPUs."""


class GpuPathConnector(PipeMaxConnector):
    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        put_in_place_of_cuda()
        layout, rows = describe_layers(kv_caches)
        self._pool = layout, rows.as_subclass(OnGpu)
        self._start_on_gpu(*self._pool)

    def begin(self, fault: Fault | Fence) -> None:
        """Start the transfers of another scheduler, without the fence that is the fault."""
        self._resources.close()
        self._start_on_gpu(*self._pool)
        transfers = self._transfers
        assert isinstance(transfers, CudaTransfers), transfers
        device = transfers.device
        assert isinstance(device, CudaDevice), device
        device.host_rows.fill_(POISON)  # NaN where nothing was stored
        if isinstance(fault, Fence):
            transfers.device = cast("CopyDevice", _WithoutFence(device, fault))
