"""The kernels on a GPU write what the torch reference writes, over poison, and nothing else."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch

pytest.importorskip("cuda.core", reason="cuda-core is not installed: kernels cannot be compiled")

from pipemax.transfer.cuda.cuda_device import CudaHostRegistry
from pipemax.transfer.cuda.kernels import KvKernels
from pipemax.transfer.cuda.pinned_pool import PinnedHostPool
from tests.gpu import kernel_reference
from tests.gpu.pools import CASES, POISON, Case, poisoned_pool, random_pool, random_tokens, seeds

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: kernels cannot run"),
]

GPU_BLOCKS, HOST_BLOCKS, TOKENS = 9, 13, 29


@pytest.fixture(scope="module")
def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture(scope="module")
def kernels(device: torch.device) -> KvKernels:
    return KvKernels(device)


@pytest.fixture
def host_pool(case: Case) -> Iterator[PinnedHostPool]:
    pool = PinnedHostPool(case.layout, HOST_BLOCKS, CudaHostRegistry())
    pool.tensor.fill_(POISON)
    yield pool
    pool.close()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_tokens_arrive_and_nothing_else_is_touched(
    case: Case, kernels: KvKernels, host_pool: PinnedHostPool, device: torch.device
) -> None:
    stream = torch.cuda.Stream(device)
    for rng in seeds(4):
        gpu = random_pool(case.layout, GPU_BLOCKS, rng)
        on_gpu = gpu.to(device)
        tokens = random_tokens(case.layout, TOKENS, GPU_BLOCKS, HOST_BLOCKS, rng)
        expected = poisoned_pool(case.layout, HOST_BLOCKS)
        kernel_reference.offload_tokens(gpu, expected, case.layout, torch.from_numpy(tokens))
        host_pool.tensor.fill_(POISON)
        torch.cuda.synchronize(device)
        kernels.offload_tokens(on_gpu, host_pool.tensor, case.layout, tokens).launch(stream.cuda_stream)
        stream.synchronize()
        assert torch.equal(host_pool.tensor, expected)
        assert torch.equal(on_gpu.cpu(), gpu)


@pytest.mark.parametrize("case", CASES[:1], ids=lambda case: case.name)
def test_an_empty_table_launches_nothing(
    case: Case, kernels: KvKernels, host_pool: PinnedHostPool, device: torch.device
) -> None:
    gpu = poisoned_pool(case.layout, 1).to(device)
    kernels.offload_tokens(gpu, host_pool.tensor, case.layout, np.zeros((0, 3), np.int32)).launch(0)
    torch.cuda.synchronize(device)
    assert (host_pool.tensor == POISON).all()


def test_memory_that_a_kernel_cannot_reach_is_refused(kernels: KvKernels, device: torch.device) -> None:
    layout = CASES[0].layout
    gpu = poisoned_pool(layout, 1).to(device)
    with pytest.raises(ValueError, match="pageable: use PinnedHostPool"):
        kernels.offload_tokens(gpu, poisoned_pool(layout, 1), layout, np.zeros((1, 3), np.int32))
