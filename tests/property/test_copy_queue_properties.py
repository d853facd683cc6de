"""Order and back-pressure of the copies that wait, whatever is put in and however the device gets on."""

from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pipemax.transfer.cuda.chunk_queue import ChunkQueue, CopyLimits, Priority
from pipemax.transfer.cuda.copy_chunks import Chunk, copy_chunks
from pipemax.transfer.cuda.device import Lane, Pool
from tests.fakes.recording_device import RecordedEvent, RecordingDevice

BLOCK_BYTES = 8
LIMIT_BYTES = 5 * BLOCK_BYTES
LANES = (Lane.PREFETCH, Lane.STORE)


class CopyQueueMachine(RuleBasedStateMachine):
    """A chunk's first target byte names it; block numbers never repeat, so submissions can be told apart."""

    def __init__(self) -> None:
        super().__init__()
        self.device = RecordingDevice(gpu_blocks=4096, host_blocks=4096, block_bytes=BLOCK_BYTES)
        self.now_s = 0.0
        self.queue = ChunkQueue(
            self.device, CopyLimits(chunk_bytes=1, in_flight_bytes=LIMIT_BYTES), self._clock
        )
        self.waiting: dict[Lane, list[tuple[Priority, int, int]]] = {lane: [] for lane in LANES}
        self.next_block = 0
        self.num_seen = 0
        self.send: tuple[RecordedEvent, RecordedEvent] | None = None

    def _clock(self) -> float:
        self.now_s += 1.0
        return self.now_s

    @precondition(lambda self: self.next_block < 4000)
    @rule(
        lane=st.sampled_from(LANES),
        priority=st.sampled_from(Priority),
        needed_by=st.integers(0, 3),
        sizes=st.lists(st.integers(1, 7), min_size=1, max_size=3),
    )
    def put(self, lane: Lane, priority: Priority, needed_by: int, sizes: list[int]) -> None:
        chunks = []
        for size in sizes:
            chunks.append(_chunk(lane, self.next_block, size))
            self.waiting[lane].append((priority, needed_by, self.next_block))
            self.next_block += size
        self.queue.put(chunks, priority=priority, needed_by=needed_by)

    @rule()
    def pump(self) -> None:
        free_before = {lane: self._bytes_in_flight(lane) == 0 for lane in LANES}
        num_before = {lane: len(self.waiting[lane]) for lane in LANES}
        self.queue.pump()
        self._see(by_flush=False)
        for lane in LANES:
            if num_before[lane] and free_before[lane] and not self._is_sending():
                assert len(self.waiting[lane]) < num_before[lane], "an idle direction stays idle"

    @rule()
    def flush(self) -> None:
        self.queue.flush()
        self._see(by_flush=True)
        assert self.queue.num_waiting == 0

    @rule(lane=st.sampled_from(LANES))
    def get_on(self, lane: Lane) -> None:
        self.device.advance(lane)

    @rule()
    def begin_send(self) -> None:
        begin, end = self.device.foreign_event(), self.device.foreign_event()
        self.device.finish(begin)
        if self.send is not None and self.send[1].done_tick is None:
            self.device.finish(self.send[1])
        self.send = (begin, end)
        self.queue.hold_for_send(begin, end)

    @precondition(lambda self: self.send is not None and self.send[1].done_tick is None)
    @rule()
    def end_send(self) -> None:
        self.device.finish(self.send[1])

    @invariant()
    def nothing_is_lost(self) -> None:
        assert self.queue.num_waiting == sum(len(entries) for entries in self.waiting.values())
        assert self.queue.counters.num_chunks == self.num_seen

    def _see(self, *, by_flush: bool) -> None:
        """What was submitted since, in its order: the most urgent first, and within the limit."""
        for batch in self.device.copies[self.num_seen :]:
            (copy,) = batch.copies
            block = copy.source.first_byte // BLOCK_BYTES
            entries = self.waiting[batch.lane]
            entry = next(entry for entry in entries if entry[2] == block)
            assert entry == min(entries), "something more urgent waited"
            entries.remove(entry)
            if not by_flush:
                assert entry[0] is Priority.ACTIVATION or not self._is_sending(), "submitted during a send"
                in_flight = self._bytes_in_flight(batch.lane)
                assert in_flight == 0 or in_flight + copy.source.num_bytes <= LIMIT_BYTES, (
                    "too much in flight"
                )
            self.num_seen += 1

    def _bytes_in_flight(self, lane: Lane) -> int:
        """Of what was seen."""
        return sum(
            batch.copies[0].source.num_bytes
            for batch in self.device.copies[: self.num_seen]
            if batch.lane is lane and not self.device.has_done(batch)
        )

    def _is_sending(self) -> bool:
        return self.send is not None and self.send[1].done_tick is None


def _chunk(lane: Lane, block: int, num_blocks: int) -> Chunk:
    pairs = [(block + index, block + index) for index in range(num_blocks)]
    (chunk,) = copy_chunks(pairs, lane=lane, block_bytes=BLOCK_BYTES, chunk_bytes=num_blocks * BLOCK_BYTES)
    return chunk


@given(
    pairs=st.lists(
        st.tuples(st.integers(0, 60), st.integers(0, 60)), unique_by=(lambda p: p[0], lambda p: p[1])
    ),
    lane=st.sampled_from(LANES),
    chunk_bytes=st.integers(1, 6 * BLOCK_BYTES),
)
def test_chunks_copy_each_block_once_and_are_full(
    pairs: list[tuple[int, int]], lane: Lane, chunk_bytes: int
) -> None:
    chunks = copy_chunks(pairs, lane=lane, block_bytes=BLOCK_BYTES, chunk_bytes=chunk_bytes)
    copied = [
        ((copy.source.first_byte + byte) // BLOCK_BYTES, (copy.target.first_byte + byte) // BLOCK_BYTES)
        for chunk in chunks
        for copy in chunk.work
        for byte in range(0, copy.source.num_bytes, BLOCK_BYTES)
    ]
    assert sorted(copied) == sorted(pairs)
    limit = max(BLOCK_BYTES, chunk_bytes // BLOCK_BYTES * BLOCK_BYTES)
    assert all(chunk.num_bytes == limit for chunk in chunks[:-1])
    assert all(0 < chunk.num_bytes <= limit for chunk in chunks)
    assert all(chunk.num_bytes == sum(copy.source.num_bytes for copy in chunk.work) for chunk in chunks)


@given(start=st.tuples(st.integers(0, 9), st.integers(0, 9)), num_blocks=st.integers(1, 20), rng=st.randoms())
def test_adjacent_blocks_become_one_copy(start: tuple[int, int], num_blocks: int, rng: Random) -> None:
    pairs = [(start[0] + block, start[1] + block) for block in range(num_blocks)]
    rng.shuffle(pairs)
    (chunk,) = copy_chunks(pairs, lane=Lane.STORE, block_bytes=BLOCK_BYTES, chunk_bytes=1 << 20)
    (copy,) = chunk.work
    size = num_blocks * BLOCK_BYTES
    assert copy.source == (Pool.GPU, start[0] * BLOCK_BYTES, size)
    assert copy.target == (Pool.HOST, start[1] * BLOCK_BYTES, size)


TestCopyQueue = CopyQueueMachine.TestCase
TestCopyQueue.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
