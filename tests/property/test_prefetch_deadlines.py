"""A prefetch goes to the device by the step that needs it, and holds up no step that does not."""

from hypothesis import given
from hypothesis import strategies as st

from pipemax.domain.units import GpuBlockId, HostBlockId
from pipemax.transfer.commands import BlockPrefetch, StepCopies
from pipemax.transfer.cuda.device import Lane
from pipemax.transfer.cuda.transfers import CudaTransfers
from tests.fakes.recording_device import FakeKernel, RecordingDevice

BLOCK_BYTES = 8
STEPS = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=8)
"""Of each step: blocks that the next step needs, and blocks that the next but one does."""


class Steps:
    """Block numbers never repeat; a step's kernel is one piece of work on the compute lane."""

    def __init__(self) -> None:
        self.device = RecordingDevice(gpu_blocks=128, host_blocks=128, block_bytes=BLOCK_BYTES)
        self._transfers = CudaTransfers(self.device, block_bytes=BLOCK_BYTES)
        self._next_block = 0
        self.step = -1
        self.needed_by: dict[int, int] = {}

    def run(self, num_prefetches: int, num_later: int, *, abandons_prefetches: bool = False) -> None:
        """One step, until its kernel has run; copies go on only where that waits for them."""
        self.step += 1
        copies = StepCopies(
            prefetches=self._prefetches(num_prefetches, 1),
            later_prefetches=self._prefetches(num_later, 2),
            abandons_prefetches=abandons_prefetches,
        )
        self._transfers.begin_step(copies)
        self._transfers.start_prefetches(copies)
        self.device.launch(Lane.COMPUTE, FakeKernel([], [], lambda: None))
        computed = self.device.record(Lane.COMPUTE)
        self._transfers.end_step(StepCopies())
        while not self.device.is_done(computed):
            if not self.device.advance(Lane.COMPUTE):
                assert self.device.advance(Lane.PREFETCH), "the step waits for what nobody does"

    def _prefetches(self, count: int, steps_ahead: int) -> tuple[BlockPrefetch, ...]:
        blocks = range(self._next_block, self._next_block + count)
        self._next_block += count
        self.needed_by.update(dict.fromkeys(blocks, self.step + steps_ahead))
        return tuple(BlockPrefetch(HostBlockId(block), GpuBlockId(block)) for block in blocks)

    def done(self) -> set[int]:
        """Blocks that are on the GPU."""
        return {
            byte // BLOCK_BYTES
            for batch in self.device.copies
            if self.device.has_done(batch)
            for _, (_, first_byte, num_bytes) in batch.copies
            for byte in range(first_byte, first_byte + num_bytes, BLOCK_BYTES)
        }

    def order(self) -> list[int]:
        """The deadlines of the blocks in the order in which they were submitted."""
        return [
            self.needed_by[copy.source.first_byte // BLOCK_BYTES]
            for batch in self.device.copies
            for copy in batch.copies
        ]


@given(steps=STEPS)
def test_what_is_needed_sooner_is_submitted_first(steps: list[tuple[int, int]]) -> None:
    run = Steps()
    for num_prefetches, num_later in [*steps, (0, 0), (0, 0)]:
        run.run(num_prefetches, num_later)
    assert run.order() == sorted(run.order())


@given(steps=STEPS)
def test_a_step_computes_once_its_own_prefetches_are_there_and_no_later(
    steps: list[tuple[int, int]],
) -> None:
    """The device prefetches only when computation can go on no other way."""
    run = Steps()
    for num_prefetches, num_later in [*steps, (0, 0)]:
        run.run(num_prefetches, num_later)
        needed = {block for block, step in run.needed_by.items() if step <= run.step}
        assert run.done() == needed


@given(num_prefetches=st.integers(0, 4), num_later=st.integers(1, 4))
def test_a_step_that_abandons_prefetches_waits_for_all_of_them(num_prefetches: int, num_later: int) -> None:
    run = Steps()
    run.run(num_prefetches, num_later)
    run.run(0, 0, abandons_prefetches=True)
    assert run.done() == run.needed_by.keys()
