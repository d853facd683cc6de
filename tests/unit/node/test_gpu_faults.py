"""The words of a GPU's fault are known, and those of other failures are not taken for one."""

import pytest

from pipemax.node.gpu_faults import is_gpu_fault


@pytest.mark.parametrize(
    "cause",
    [
        "torch.AcceleratorError: CUDA error: an illegal memory access was encountered CUDA kernel errors might be "
        "asynchronously reported",
        "RuntimeError: CUDA error: unspecified launch failure",
        "RuntimeError: CUDA error: uncorrectable ECC error encountered",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79 GiB",
        "RuntimeError: Triton Error [CUDA]: an illegal memory access was encountered",
        "TransferError: CUDA could not submit 12 copies: an illegal memory access (cudaErrorIllegalAddress)",
        "RuntimeError: CUDA driver error: CUDA_ERROR_ECC_UNCORRECTABLE",
        "NVRM: Xid (PCI:0000:3b:00): 79, pid=1, GPU has fallen off the bus.",
        "Unable to determine the device handle: GPU is lost. Reboot the system to recover this GPU",
        "torch.distributed.DistBackendError: NCCL error in: ncclUnhandledCudaError: Call to CUDA function failed",
        "RuntimeError: NCCL error: remote process exited or there was a network error",
        "RuntimeError: CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling cublasGemmEx",
    ],
)
def test_a_fault_of_a_gpu_is_known_by_its_words(cause: str) -> None:
    assert is_gpu_fault(cause)


@pytest.mark.parametrize(
    "cause",
    [
        "IndexError: pop from an empty deque (stage_clock.py:60 in begin)",
        "vLLM's process VllmWorker-0 was killed by SIGKILL, which the kernel does when memory runs out",
        "MemoryError: you tried to allocate 4 bytes",
        "ValueError: expected 3 GPUs and got 2",
        "RuntimeError: CUDA error: invalid argument",
        "torch.AcceleratorError: CUDA error: device-side assert triggered",  # by a row's token id, for instance
        "DistBackendError: NCCL error: unhandled cuda error, device-side assert triggered",
        "TransferError: CUDA could not submit 12 copies: invalid argument (cudaErrorInvalidValue)",
    ],
)
def test_other_failures_are_not_taken_for_one(cause: str) -> None:
    assert not is_gpu_fault(cause)
