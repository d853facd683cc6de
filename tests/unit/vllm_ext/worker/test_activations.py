"""Which settings of NCCL have a stage's activations arrive by the copy engine."""

import pytest

from pipemax.vllm_ext.worker.activations import arrive_by_copy_engine


@pytest.mark.parametrize(
    ("settings", "by_copy_engine"),
    [
        ({}, False),
        ({"NCCL_P2P_DISABLE": "1"}, False),  # kernels read host memory
        ({"NCCL_SHM_USE_CUDA_MEMCPY": "1"}, False),  # the sending side alone
        ({"NCCL_SHM_MEMCPY_MODE": "3"}, False),
        ({"NCCL_SHM_USE_CUDA_MEMCPY": "0", "NCCL_SHM_MEMCPY_MODE": "3"}, False),
        ({"NCCL_SHM_USE_CUDA_MEMCPY": "1", "NCCL_SHM_MEMCPY_MODE": "1"}, False),
        ({"NCCL_SHM_USE_CUDA_MEMCPY": "1", "NCCL_SHM_MEMCPY_MODE": "2"}, True),
        ({"NCCL_SHM_USE_CUDA_MEMCPY": "0x1", "NCCL_SHM_MEMCPY_MODE": "3"}, True),
        ({"NCCL_SHM_USE_CUDA_MEMCPY": "yes", "NCCL_SHM_MEMCPY_MODE": "3"}, False),
    ],
)
def test_they_do_if_nccl_is_told_to_receive_so(
    settings: dict[str, str], by_copy_engine: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    assert arrive_by_copy_engine(1, settings) is by_copy_engine
    assert ("in pieces" if by_copy_engine else "in one call") in caplog.text


def test_a_first_stage_receives_none() -> None:
    assert not arrive_by_copy_engine(0, {"NCCL_SHM_USE_CUDA_MEMCPY": "1", "NCCL_SHM_MEMCPY_MODE": "3"})
