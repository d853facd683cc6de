"""The CUDA backend's calls on its device, at its end, and where a copy cannot be."""

import pytest

from pipemax.domain.units import GpuBlockId, HostBlockId
from pipemax.transfer.commands import BlockPrefetch, BlockStore, StepCopies
from pipemax.transfer.cuda.device import Pool
from pipemax.transfer.cuda.transfers import CudaTransfers
from tests.fakes.recording_device import RecordingDevice

BLOCK_BYTES = 16


def prefetch(host: int, gpu: int) -> BlockPrefetch:
    return BlockPrefetch(source=HostBlockId(host), target=GpuBlockId(gpu))


def store(gpu: int, host: int) -> BlockStore:
    return BlockStore(source=GpuBlockId(gpu), target=HostBlockId(host))


def run_step(transfers: CudaTransfers, copies: StepCopies) -> None:
    transfers.begin_step(copies)
    transfers.start_prefetches(copies)
    transfers.end_step(copies)


@pytest.fixture
def device() -> RecordingDevice:
    return RecordingDevice(gpu_blocks=8, host_blocks=8, block_bytes=BLOCK_BYTES)


@pytest.fixture
def transfers(device: RecordingDevice) -> CudaTransfers:
    return CudaTransfers(device, block_bytes=BLOCK_BYTES)


def test_close_finishes_what_is_submitted_and_tells_what_was_copied(
    transfers: CudaTransfers, device: RecordingDevice, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    device.memory[Pool.GPU][:] = 7
    transfers.begin_step(StepCopies())
    transfers.end_step(StepCopies(stores=(store(3, 2),)))
    transfers.close()
    assert "0.00 GiB prefetched, 0.00 GiB stored" in caplog.text
    transfers.close()
    assert (device.memory[Pool.HOST][2 * BLOCK_BYTES : 3 * BLOCK_BYTES] == 7).all()


def test_a_copy_that_cannot_be_submitted_is_raised_at_once(transfers: CudaTransfers) -> None:
    with pytest.raises(ValueError, match="leaves its pool"):
        run_step(transfers, StepCopies(prefetches=(prefetch(99, 0),)))
    with pytest.raises(ValueError, match="leaves its pool"):
        transfers.end_step(StepCopies(stores=(store(0, 99),)))
