"""The CUDA backend's calls on its device, one situation at a time."""

import pytest

from pipemax.domain.units import GpuBlockId, HostBlockId
from pipemax.transfer.commands import BlockPrefetch, BlockStore, StepCopies
from pipemax.transfer.cuda.device import Fence, Lane, Pool
from pipemax.transfer.cuda.transfers import CudaTransfers
from pipemax.transfer.store_fences import PrefetchFences, StoreFences
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


class TestSteps:
    def test_prefetches_are_submitted_when_they_are_started_and_the_next_step_waits_for_them(
        self, transfers: CudaTransfers, device: RecordingDevice
    ) -> None:
        prefetches = tuple(prefetch(block, block) for block in range(8))
        copies = StepCopies(prefetches=prefetches, later_prefetches=(prefetch(1, 3),))
        transfers.begin_step(copies)
        assert device.copies == []
        transfers.start_prefetches(copies)
        assert [batch.lane for batch in device.copies] == [Lane.PREFETCH] * 3
        assert (Lane.COMPUTE, Fence.COMPUTE_AFTER_PREFETCH) not in device.waits
        transfers.end_step(StepCopies())
        transfers.begin_step(StepCopies())
        assert device.waits[-1] == (Lane.COMPUTE, Fence.COMPUTE_AFTER_PREFETCH)
        assert transfers.counts.loaded_bytes == 9 * BLOCK_BYTES

    def test_a_step_without_earlier_copies_waits_for_nothing(
        self, transfers: CudaTransfers, device: RecordingDevice
    ) -> None:
        for _ in range(3):
            transfers.begin_step(StepCopies())
            transfers.end_step(StepCopies())
        assert device.waits == []

    def test_computation_waits_for_stores_only_where_it_is_told(
        self, transfers: CudaTransfers, device: RecordingDevice
    ) -> None:
        transfers.begin_step(StepCopies(store_fence=None))
        transfers.end_step(StepCopies(stores=(store(0, 0),)))
        for fence in (None, None, 2, 1):
            transfers.begin_step(StepCopies(store_fence=fence))
            transfers.end_step(StepCopies())
            fenced = (Lane.COMPUTE, Fence.COMPUTE_AFTER_STORE)
            # Two steps back from step 3 is step 1, which stored nothing after step 0.
            assert (fenced in device.waits) == (fence in (2, 1)), fence
        assert device.waits.count(fenced) == 1, "it has waited for that store before"

    def test_prefetch_times_come_once_they_are_known(
        self, transfers: CudaTransfers, device: RecordingDevice
    ) -> None:
        run_step(transfers, StepCopies(prefetches=(prefetch(0, 0), prefetch(1, 1), prefetch(5, 4))))
        assert transfers.begin_step(StepCopies()).prefetches == ()
        transfers.end_step(StepCopies())
        device.synchronize()
        wait = transfers.begin_step(StepCopies())
        (timing,) = wait.prefetches
        assert timing.num_blocks == 3
        assert timing.seconds > 0
        assert wait.stall_s > 0, "the second step waited for the first one's prefetches"

    def test_steps_alternate(self, transfers: CudaTransfers) -> None:
        with pytest.raises(AssertionError, match="no step"):
            transfers.end_step(StepCopies())
        with pytest.raises(AssertionError, match="no step"):
            transfers.start_prefetches(StepCopies())
        transfers.begin_step(StepCopies())
        with pytest.raises(AssertionError, match="not ended"):
            transfers.begin_step(StepCopies())

    def test_a_step_whose_prefetches_were_forgotten_does_not_end(self, transfers: CudaTransfers) -> None:
        transfers.begin_step(StepCopies(prefetches=(prefetch(0, 0),)))
        with pytest.raises(AssertionError, match="were not started"):
            transfers.end_step(StepCopies())

    def test_old_store_events_do_not_pile_up(self, transfers: CudaTransfers, device: RecordingDevice) -> None:
        for _ in range(600):
            transfers.begin_step(StepCopies(store_fence=None))
            transfers.end_step(StepCopies(stores=(store(0, 0),)))
        assert len(transfers._store_marks) <= 256
        assert device.waits.count((Lane.COMPUTE, Fence.COMPUTE_AFTER_STORE)) > 300

    def test_close_finishes_what_is_submitted_and_tells_what_was_copied(
        self, transfers: CudaTransfers, device: RecordingDevice, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level("INFO")
        device.memory[Pool.GPU][:] = 7
        transfers.begin_step(StepCopies())
        transfers.end_step(StepCopies(stores=(store(3, 2),)))
        transfers.close()
        assert "0.00 GiB prefetched, 0.00 GiB stored" in caplog.text
        transfers.close()
        assert (device.memory[Pool.HOST][2 * BLOCK_BYTES : 3 * BLOCK_BYTES] == 7).all()


class TestErrors:
    def test_a_copy_that_cannot_be_submitted_is_raised_at_once(self, transfers: CudaTransfers) -> None:
        with pytest.raises(ValueError, match="leaves its pool"):
            run_step(transfers, StepCopies(prefetches=(prefetch(99, 0),)))
        with pytest.raises(ValueError, match="leaves its pool"):
            transfers.end_step(StepCopies(stores=(store(0, 99),)))


class TestPrefetchFences:
    def test_prefetches_wait_only_for_stores_of_their_blocks(self) -> None:
        fences = PrefetchFences()
        assert (
            fences.plan_step(saves=[], prefetches=[prefetch(0, 0)], stores=[store(1, 2), store(3, 4)]) is None
        )
        assert fences.plan_step(saves=[], prefetches=[prefetch(5, 6)], stores=[]) is None
        assert fences.plan_step(saves=[], prefetches=[prefetch(2, 6)], stores=[]) == 2, (
            "its source was stored"
        )
        assert fences.plan_step(saves=[], prefetches=[prefetch(7, 3)], stores=[]) is None, (
            "waited for with it"
        )

    def test_a_target_that_is_being_saved_is_waited_for(self) -> None:
        fences = PrefetchFences()
        assert fences.plan_step(saves=[store(1, 2)], prefetches=[prefetch(5, 1)], stores=[store(1, 7)]) == 0
        assert fences.plan_step(saves=[], prefetches=[prefetch(7, 3)], stores=[]) == 1, "of the stores after"

    def test_a_store_of_a_large_pool_is_remembered_however_long_ago_it_was(self) -> None:
        fences = PrefetchFences()
        fences.plan_step(saves=[], prefetches=[], stores=[store(3, 5)])
        fences.plan_step(saves=[], prefetches=[], stores=[])
        fences.plan_step(saves=[], prefetches=[prefetch(400_000, 300_000)], stores=[store(300_000, 400_000)])
        assert fences.plan_step(saves=[], prefetches=[prefetch(5, 0)], stores=[]) == 3
        assert fences.plan_step(saves=[], prefetches=[prefetch(400_000, 0)], stores=[]) == 2

    def test_the_lane_does_not_wait_for_other_stores(
        self, transfers: CudaTransfers, device: RecordingDevice
    ) -> None:
        transfers.begin_step(StepCopies())
        transfers.end_step(StepCopies(stores=(store(0, 0),)))
        for fence, waits in ((None, False), (2, True)):
            run_step(transfers, StepCopies(prefetches=(prefetch(5, 5),), prefetch_fence=fence))
            assert ((Lane.PREFETCH, Fence.PREFETCH_AFTER_STORE) in device.waits) is waits


class TestStoreFences:
    def test_only_blocks_that_a_store_reads_need_a_fence(self) -> None:
        fences = StoreFences()
        first = fences.plan_step(overwrites=[GpuBlockId(1)], saves=[], stores=[store(1, 0), store(2, 1)])
        assert first is None
        assert fences.plan_step(overwrites=[GpuBlockId(3)], saves=[], stores=[]) is None
        assert fences.plan_step(overwrites=[GpuBlockId(2)], saves=[], stores=[]) == 2

    def test_one_wait_covers_all_earlier_stores(self) -> None:
        fences = StoreFences()
        fences.plan_step(overwrites=[], saves=[], stores=[store(1, 0)])
        fences.plan_step(overwrites=[], saves=[], stores=[store(2, 1)])
        assert fences.plan_step(overwrites=[GpuBlockId(2)], saves=[], stores=[]) == 1
        assert fences.plan_step(overwrites=[GpuBlockId(1)], saves=[], stores=[]) is None

    def test_waiting_for_a_steps_saves_does_not_cover_its_stores(self) -> None:
        fences = StoreFences()
        assert fences.plan_step(overwrites=[GpuBlockId(1)], saves=[store(1, 0)], stores=[store(2, 1)]) == 0
        assert fences.plan_step(overwrites=[GpuBlockId(2)], saves=[], stores=[]) == 1
