"""Tell by its words whether what ended an engine is a fault of a GPU, or of the link between GPUs.

Such a fault is the machine's: no row is suspected, condemned or run apart for it. The words are those of CUDA, torch,
Triton, NCCL and NVIDIA's driver.
"""

import re

_ERRORS = re.compile(
    # What CUDA says of a wrong call is the caller's fault.
    r"CUDA error: (?!device-side assert|invalid|no kernel image|operation not supported)"
    r"|Triton Error \[CUDA\]: (?!device-side assert|invalid)"
    r"|CUDA out of memory|(torch|cuda)\.OutOfMemoryError"
    r"|cudaError(IllegalAddress|LaunchFailure|LaunchTimeout|ECCUncorrectable|NvlinkUncorrectable|MemoryAllocation|"
    r"HardwareStackError|IllegalInstruction|MisalignedAddress|DevicesUnavailable|NoDevice|ExternalDevice|Unknown)"
    r"|CUDA_ERROR_(ILLEGAL_ADDRESS|LAUNCH_FAILED|LAUNCH_TIMEOUT|ECC_UNCORRECTABLE|NVLINK_UNCORRECTABLE|OUT_OF_MEMORY|"
    r"HARDWARE_STACK_ERROR|ILLEGAL_INSTRUCTION|MISALIGNED_ADDRESS|NO_DEVICE|EXTERNAL_DEVICE|UNKNOWN)"
    r"|an illegal memory access was encountered|unspecified launch failure|uncorrectable (ECC|NVLink) error"
    r"|\bXid\b|fallen off the bus|GPU is lost"
    r"|NCCL error|NCCL watchdog|NCCL communicator was aborted|nccl(UnhandledCuda|System|Internal|Remote)Error"
    r"|CUBLAS_STATUS_(NOT_INITIALIZED|ALLOC_FAILED|EXECUTION_FAILED|INTERNAL_ERROR)"
)
_ASSERTION = re.compile(r"device-side assert|cudaErrorAssert|CUDA_ERROR_ASSERT")


def is_gpu_fault(cause: str) -> bool:
    """Tell whether an engine died of a fault of a GPU.

    An assertion of a kernel is none: it checks its input, which may be a row's, and the search for that row is made.
    """
    return _ERRORS.search(cause) is not None and _ASSERTION.search(cause) is None
