"""The CUDA backend's calls on its device, one situation at a time."""

import pytest

from pipemax.domain.errors import TransferError
from pipemax.domain.units import GpuBlockId, HostBlockId
from pipemax.transfer.commands import BlockPrefetch, BlockStore, StepCopies, TokenStore
from pipemax.transfer.cuda.chunk_queue import ChunkQueue, CopyLimits, Priority
from pipemax.transfer.cuda.copy_chunks import copy_chunks
from pipemax.transfer.cuda.device import Fence, Hold, Lane, Pool
from pipemax.transfer.cuda.submitter import Submitter
from pipemax.transfer.cuda.transfers import CudaTransfers
from pipemax.transfer.store_fences import StoreFences
from tests.fakes.recording_device import FakeKernel, RecordingDevice

BLOCK_BYTES = 16


def prefetch(host: int, gpu: int) -> BlockPrefetch:
    return BlockPrefetch(source=HostBlockId(host), target=GpuBlockId(gpu))


def store(gpu: int, host: int) -> BlockStore:
    return BlockStore(source=GpuBlockId(gpu), target=HostBlockId(host))


@pytest.fixture
def device() -> RecordingDevice:
    return RecordingDevice(gpu_blocks=8, host_blocks=8, block_bytes=BLOCK_BYTES)


@pytest.fixture
def queue(device: RecordingDevice) -> ChunkQueue:
    return ChunkQueue(
        device, CopyLimits(chunk_bytes=2 * BLOCK_BYTES, in_flight_bytes=4 * BLOCK_BYTES), lambda: 0.0
    )


@pytest.fixture
def transfers(device: RecordingDevice, queue: ChunkQueue) -> CudaTransfers:
    return CudaTransfers(device, queue, block_bytes=BLOCK_BYTES)


class TestSteps:
    def test_prefetches_wait_in_the_queue_until_they_are_needed(
        self, transfers: CudaTransfers, device: RecordingDevice, queue: ChunkQueue
    ) -> None:
        transfers.begin_step(StepCopies(prefetches=tuple(prefetch(block, block) for block in range(8))))
        assert (queue.num_waiting, device.copies) == (4, [])
        assert queue.pump() == 2
        assert queue.pump() == 0, "four blocks are in flight"
        transfers.end_step(StepCopies())
        transfers.begin_step(StepCopies())
        assert queue.num_waiting == 0
        assert queue.counters.num_flushed == 2
        assert queue.counters.bytes_by_lane[Lane.PREFETCH] == 8 * BLOCK_BYTES
        assert queue.counters.peak_in_flight_bytes == 8 * BLOCK_BYTES
        assert device.waits[-1] == (Lane.COMPUTE, Fence.COMPUTE_AFTER_PREFETCH)

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

    def test_stores_do_not_take_up_room_before_they_can_run(
        self, transfers: CudaTransfers, device: RecordingDevice, queue: ChunkQueue
    ) -> None:
        transfers.begin_step(StepCopies())
        device.launch(Lane.COMPUTE, FakeKernel([], [], lambda: None))
        transfers.end_step(StepCopies(stores=(store(0, 0),)))
        assert queue.pump() == 0
        device.advance(Lane.COMPUTE)
        assert queue.pump() == 1

    def test_prefetch_times_come_once_they_are_known(
        self, transfers: CudaTransfers, device: RecordingDevice
    ) -> None:
        transfers.begin_step(StepCopies(prefetches=(prefetch(0, 0), prefetch(1, 1), prefetch(5, 4))))
        transfers.end_step(StepCopies())
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
        transfers.begin_step(StepCopies())
        with pytest.raises(AssertionError, match="not ended"):
            transfers.begin_step(StepCopies())

    def test_old_store_events_do_not_pile_up(self, transfers: CudaTransfers, device: RecordingDevice) -> None:
        for _ in range(600):
            transfers.begin_step(StepCopies(store_fence=None))
            transfers.end_step(StepCopies(stores=(store(0, 0),)))
        assert len(transfers._store_marks) <= 256
        assert device.waits.count((Lane.COMPUTE, Fence.COMPUTE_AFTER_STORE)) > 300

    def test_close_finishes_what_is_queued_and_tells_what_was_copied(
        self, transfers: CudaTransfers, device: RecordingDevice, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level("INFO")
        device.memory[Pool.GPU][:] = 7
        transfers.begin_step(StepCopies())
        transfers.end_step(StepCopies(stores=(store(3, 2),)))
        transfers.close()
        assert "0.00 GiB stored in 1 chunks, 1 of them at a step's beginning" in caplog.text
        transfers.close()
        assert (device.memory[Pool.HOST][2 * BLOCK_BYTES : 3 * BLOCK_BYTES] == 7).all()

    def test_without_a_kernel_blocks_with_new_tokens_are_stored_whole(
        self, transfers: CudaTransfers, device: RecordingDevice
    ) -> None:
        transfers.begin_step(StepCopies(store_fence=None))
        tokens = TokenStore(source=GpuBlockId(3), target=HostBlockId(5), first_slot=1, num_slots=1)
        transfers.end_step(StepCopies(token_stores=(tokens,)))
        transfers.begin_step(StepCopies(store_fence=None))
        (batch,) = device.copies
        assert batch.copies[0].source == (Pool.GPU, 3 * BLOCK_BYTES, BLOCK_BYTES)
        assert device.waits[-1] == (Lane.COMPUTE, Fence.COMPUTE_AFTER_STORE), "it goes on filling the block"


class TestSends:
    def test_nothing_but_activations_is_submitted_during_a_send(
        self, transfers: CudaTransfers, device: RecordingDevice, queue: ChunkQueue
    ) -> None:
        transfers.begin_step(StepCopies(prefetches=(prefetch(0, 0),)))
        transfers.end_step(StepCopies())
        sent = device.foreign_event()
        transfers.hold_for_send(sent)
        assert queue.pump() == 0
        pairs = [(block, block) for block in range(2, 6)]
        activation = copy_chunks(
            pairs, lane=Lane.PREFETCH, block_bytes=BLOCK_BYTES, chunk_bytes=4 * BLOCK_BYTES
        )
        queue.put(activation, priority=Priority.ACTIVATION)
        assert queue.pump() == 1
        device.finish(sent)
        assert queue.pump() == 0, "the activation takes up the room"
        device.synchronize()
        assert queue.pump() == 1
        counts = transfers.counts
        assert (counts.num_chunks, counts.num_held_chunks, counts.num_late_chunks) == (2, 1, 0)
        assert counts.loaded_bytes == 5 * BLOCK_BYTES

    def test_chunks_needed_now_queue_behind_the_send(
        self, transfers: CudaTransfers, device: RecordingDevice
    ) -> None:
        transfers.begin_step(StepCopies(prefetches=(prefetch(0, 0),)))
        transfers.end_step(StepCopies())
        transfers.hold_for_send(device.foreign_event())
        transfers.begin_step(StepCopies())
        assert (Lane.PREFETCH, Hold.AFTER_SEND) in device.waits
        assert len(device.copies) == 1


class TestErrors:
    def test_a_copy_that_the_thread_cannot_submit_is_raised_at_the_next_step(
        self, device: RecordingDevice, queue: ChunkQueue
    ) -> None:
        submitter = Submitter(queue)
        transfers = CudaTransfers(device, queue, block_bytes=BLOCK_BYTES, submitter=submitter)
        transfers.begin_step(StepCopies(prefetches=(prefetch(99, 0),)))
        submitter._thread.join(timeout=10)
        with pytest.raises(TransferError, match="leaves its pool"):
            transfers.end_step(StepCopies())
        submitter.close()
        submitter.close()

    def test_a_copy_that_a_flush_cannot_submit_is_raised_there(self, transfers: CudaTransfers) -> None:
        transfers.begin_step(StepCopies())
        transfers.end_step(StepCopies(stores=(store(0, 99),)))
        with pytest.raises(ValueError, match="leaves its pool"):
            transfers.begin_step(StepCopies())

    @pytest.mark.parametrize("name", ["chunk_bytes", "in_flight_bytes"])
    def test_limits_below_one_byte_are_refused(self, name: str) -> None:
        with pytest.raises(ValueError, match=f"{name} is at least 1, not 0"):
            CopyLimits(**{name: 0})


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
