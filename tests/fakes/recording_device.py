"""A device that carries out nothing but knows what CUDA would be free to do: the happens-before checker.

Each lane has a vector clock: how far into every lane its work is certain to come after. An event keeps its lane's
clock, a wait joins it to another lane's. Two accesses to the same bytes, one of them a write, must be ordered by
these clocks. What the caller merely saw to be done orders nothing here, so that nothing is proved by luck.

Memory is real, and changed in the order of submission: one of the orders that CUDA may choose. Where all conflicting
accesses are ordered, every other one gives the same bytes.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from pipemax.transfer.cuda.device import Copy, Fence, KernelCall, Lane, Pool, Span

Clock = dict[Lane, int]


@dataclass(eq=False)
class RecordedEvent:
    """On a lane, behind its first ``position`` pieces of work and waits."""

    clock: Clock
    lane: Lane
    position: int
    done_tick: int | None = None


class RecordedCopies(NamedTuple):
    """One batch."""

    lane: Lane
    copies: tuple[Copy, ...]
    position: int
    """Its lane has done it once it has done so many pieces of work and waits."""


class Access(NamedTuple):
    """Of one piece of work, to one block of a pool."""

    work: str
    lane: Lane
    time: int
    part: int
    first_byte: int
    end_byte: int
    is_write: bool


class Race(NamedTuple):
    """Two unordered accesses to the same bytes."""

    pool: Pool
    block: int
    earlier: Access
    later: Access


@dataclass(frozen=True)
class FakeKernel:
    """What a kernel touches, and what it does."""

    reads_: Sequence[Span]
    writes_: Sequence[Span]
    run: Callable[[], None]

    def launch(self, stream: int) -> None:
        self.run()

    def reads(self) -> Sequence[Span]:
        return self.reads_

    def writes(self) -> Sequence[Span]:
        return self.writes_


@dataclass
class _LaneState:
    clock: Clock = field(default_factory=lambda: dict.fromkeys(Lane, 0))
    todo: deque[RecordedEvent | None] = field(default_factory=deque)  # None is work, an event is waited for
    marks: deque[RecordedEvent] = field(default_factory=deque)
    num_submitted: int = 0
    num_done: int = 0


class RecordingDevice:
    """Implements ``CopyDevice``. ``dropped``: a fence that it leaves out, to show that it is missed."""

    def __init__(
        self, *, gpu_blocks: int, host_blocks: int, block_bytes: int, dropped: Fence | None = None
    ) -> None:
        self.block_bytes = block_bytes
        self.memory = {
            Pool.GPU: np.zeros(gpu_blocks * block_bytes, dtype=np.uint8),
            Pool.HOST: np.zeros(host_blocks * block_bytes, dtype=np.uint8),
        }
        self.races: list[Race] = []
        self.waits: list[tuple[Lane, Fence]] = []
        self.copies: list[RecordedCopies] = []
        self._dropped = dropped
        self._lanes = {lane: _LaneState() for lane in Lane}
        self._accesses: dict[tuple[Pool, int], list[Access]] = {}
        self._tick = 0
        self._lock = threading.RLock()

    # -- CopyDevice -----------------------------------------------------------------------------------------------

    def record(self, lane: Lane) -> RecordedEvent:
        with self._lock:
            state = self._lanes[lane]
            event = RecordedEvent(dict(state.clock), lane, state.num_submitted)
            state.marks.append(event)
            self._mark_done(state)
            return event

    def wait(self, lane: Lane, event: RecordedEvent, reason: Fence) -> None:
        with self._lock:
            self.waits.append((lane, reason))
            if reason is self._dropped:
                return
            state = self._lanes[lane]
            state.todo.append(event)
            state.num_submitted += 1
            state.clock = {other: max(state.clock[other], event.clock[other]) for other in Lane}

    def is_done(self, event: RecordedEvent) -> bool:
        return event.done_tick is not None

    def elapsed_s(self, begin: RecordedEvent, end: RecordedEvent) -> float:
        assert begin.done_tick is not None, "elapsed time of an event that is not done"
        assert end.done_tick is not None, "elapsed time of an event that is not done"
        return (end.done_tick - begin.done_tick) * 1e-3

    def copy(self, lane: Lane, copies: Iterable[Copy]) -> None:
        with self._lock:
            time = self._submit(lane)
            self.copies.append(RecordedCopies(lane, tuple(copies), self._lanes[lane].num_submitted))
            for part, copy in enumerate(copies):
                self._check_span(copy.source)
                self._check_span(copy.target)
                if copy.source.num_bytes != copy.target.num_bytes:
                    raise ValueError(f"lengths differ: {copy}")
                self._access(f"copy {copy}", lane, time, part, [copy.source], is_write=False)
                self._access(f"copy {copy}", lane, time, part, [copy.target], is_write=True)
                self.bytes_of(copy.target)[:] = self.bytes_of(copy.source)

    def give_way(self, lane: Lane) -> None:
        with self._lock:
            state = self._lanes[lane]
            state.todo.append(None)
            state.num_submitted += 1

    def launch(self, lane: Lane, call: KernelCall) -> None:
        with self._lock:
            time = self._submit(lane)
            self._access("kernel", lane, time, 0, call.reads(), is_write=False)
            self._access("kernel", lane, time, 0, call.writes(), is_write=True)
            call.launch(lane.value)

    def synchronize(self) -> None:
        while any(self.advance(lane) for lane in Lane):
            pass

    # -- what a GPU does by itself ---------------------------------------------------------------

    def advance(self, lane: Lane) -> bool:
        """The lane's next piece of work is done; False where there is none, or where it waits."""
        with self._lock:
            state = self._lanes[lane]
            if not state.todo or (state.todo[0] is not None and not self.is_done(state.todo[0])):
                return False
            state.todo.popleft()
            state.num_done += 1
            self._tick += 1
            self._mark_done(state)
            return True

    def has_done(self, batch: RecordedCopies) -> bool:
        return batch.position <= self._lanes[batch.lane].num_done

    def bytes_of(self, span: Span) -> np.ndarray:
        return self.memory[span.pool][span.first_byte : span.first_byte + span.num_bytes]

    # -- clocks ---------------------------------------------------------------------------------------------------

    def _submit(self, lane: Lane) -> int:
        state = self._lanes[lane]
        state.todo.append(None)
        state.num_submitted += 1
        state.clock[lane] += 1
        return state.clock[lane]

    def _mark_done(self, state: _LaneState) -> None:
        while state.marks and state.marks[0].position <= state.num_done:
            state.marks.popleft().done_tick = self._tick

    def _check_span(self, span: Span) -> None:
        if not 0 <= span.first_byte < span.first_byte + span.num_bytes <= self.memory[span.pool].size:
            raise ValueError(f"{span} leaves its pool of {self.memory[span.pool].size} bytes")

    def _access(
        self, work: str, lane: Lane, time: int, part: int, spans: Iterable[Span], *, is_write: bool
    ) -> None:
        for pool, first, num_bytes in spans:
            for block in range(first // self.block_bytes, (first + num_bytes - 1) // self.block_bytes + 1):
                begin = max(first, block * self.block_bytes)
                end = min(first + num_bytes, (block + 1) * self.block_bytes)
                self._access_block(pool, block, Access(work, lane, time, part, begin, end, is_write))

    def _access_block(self, pool: Pool, block: int, access: Access) -> None:
        clock = self._lanes[access.lane].clock
        earlier = self._accesses.setdefault((pool, block), [])
        kept = []
        for before in earlier:
            overlaps = before.first_byte < access.end_byte and access.first_byte < before.end_byte
            if overlaps and (before.is_write or access.is_write) and not _is_ordered(before, access, clock):
                self.races.append(Race(pool, block, before, access))
            # A later access that is ordered behind this write is ordered behind what it covers.
            is_covered = before.first_byte >= access.first_byte and before.end_byte <= access.end_byte
            if not (access.is_write and is_covered):
                kept.append(before)
        self._accesses[pool, block] = [*kept, access]


def _is_ordered(before: Access, access: Access, clock: Clock) -> bool:
    if before.lane is access.lane and before.time == access.time:
        return before.part == access.part  # copies of one batch run in any order
    return before.time <= clock[before.lane]
