"""Several pipeline stages on one GPU, to compare tokens: ``worker_cls: lab.gpu.one_gpu.OneGpuWorker``.

NCCL refuses two ranks on a GPU. So the process groups are gloo's, and what stages send goes through the CPU. Speed
means nothing here: the stages' processes take turns on the GPU. Set ``VLLM_USE_V2_MODEL_RUNNER=0``, under which
nothing but these sends crosses stages on the device, and ``VLLM_DISABLE_PYNCCL=1``. Importing this module changes
vLLM's process groups, so import it only in a worker.
"""

from collections import deque
from typing import Any

import torch
from vllm.distributed.parallel_state import GroupCoordinator
from vllm.platforms import current_platform
from vllm.v1.worker.gpu_worker import Worker

from pipemax.vllm_ext.worker.gpu_worker import PipeMaxGpuWorker

_MOST_UNSENT = 8

type(current_platform).dist_backend = "gloo"
_unsent: deque[Any] = deque()


def _isend_tensor_dict(
    self: GroupCoordinator,
    tensor_dict: dict[str, Any],
    dst: int | None = None,
    all_gather_group: Any = None,
    all_gather_tensors: Any = None,
) -> list[Any]:
    if self.world_size <= 1:
        return []
    target = (self.rank_in_group + 1) % self.world_size if dst is None else dst
    on_cpu = {
        name: value.to("cpu") if isinstance(value, torch.Tensor) else value
        for name, value in tensor_dict.items()
    }
    # Without waiting for the receiver: the step's end is marked after this call.
    _unsent.append(self.isend_object(on_cpu, dst=target))
    while len(_unsent) > _MOST_UNSENT:
        _unsent.popleft().wait()
    return []


def _irecv_tensor_dict(
    self: GroupCoordinator,
    src: int | None = None,
    all_gather_group: Any = None,
    all_gather_tensors: Any = None,
) -> tuple[dict[str, Any] | None, list[Any], list[Any]]:
    if self.world_size <= 1:
        return None, [], []
    source = (self.rank_in_group - 1) % self.world_size if src is None else src
    device = torch.device("cuda", torch.cuda.current_device())
    received = {
        name: value.to(device) if isinstance(value, torch.Tensor) else value
        for name, value in self.recv_object(source).items()
    }
    return received, [], []


GroupCoordinator.isend_tensor_dict = _isend_tensor_dict
GroupCoordinator.irecv_tensor_dict = _irecv_tensor_dict


class _OnOneGpu:
    parallel_config: Any

    def init_device(self) -> None:
        self.parallel_config.assigned_physical_gpu_ids = [0] * self.parallel_config.world_size
        super().init_device()


class OneGpuWorker(_OnOneGpu, PipeMaxGpuWorker):
    """A stage under PipeMax."""


class OneGpuStockWorker(_OnOneGpu, Worker):
    """A stage under stock vLLM."""
