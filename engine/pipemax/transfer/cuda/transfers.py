"""The copies of a stage's steps on a GPU: the ordering rule of ``orchestrator``, with events instead of waiting.

    step t    begin                                              end
    compute   | wait for the prefetches that t needs | the model's kernels ────────── |
    prefetch  | wait for the compute before, for stores | prefetches of t, needed at t + 1, then those at t + 2
    store     | saves of t |                                        | wait for the compute | stores of t

The caller never waits for the device. Every wait is named (``device.Fence``); a checker shows that each is needed and
that together they suffice (``test_happens_before.py``). A store needs no wait for earlier prefetches that read the
host block it overwrites: it comes after its step's computation, which comes after those prefetches. Only prefetches
for later steps may still run at the same time, and they read blocks that nobody overwrites unless the step
``abandons_prefetches``.

The host itself orders one thing: ``begin_step`` first puts all copies of earlier steps on their lanes, because a lane
cannot wait for what is not submitted.
"""

import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from pipemax.transfer.commands import (
    BlockPrefetch,
    BlockStore,
    CopyCounts,
    PrefetchTiming,
    StepCopies,
    StepWait,
    TokenStore,
)
from pipemax.transfer.cuda.chunk_queue import ChunkQueue, Priority, Ticket
from pipemax.transfer.cuda.copy_chunks import Chunk, copy_chunks
from pipemax.transfer.cuda.device import CopyDevice, DeviceEvent, Fence, KernelCall, Lane
from pipemax.transfer.cuda.submitter import Submitter

log = logging.getLogger(__name__)

_MAX_STORE_MARKS = 256
"""Maximum of store events kept for fences. Beyond it, computation waits for the oldest, which was done long ago."""

MakeTokenStore = Callable[[Sequence[TokenStore]], tuple[KernelCall, int]]
"""Makes the kernel that stores single tokens; returns also its bytes. ``ValueError`` if a store leaves a pool."""


class _StoreMark(NamedTuple):
    """A mark behind a step's saves (moment ``2 · step``) or stores (``2 · step + 1``) on the store lane."""

    moment: int
    event: DeviceEvent


class _Prefetch(NamedTuple):
    """One entry of the prefetch lane, which is in the order of the deadlines."""

    needed_by: int
    """The first step that may read it."""
    ticket: Ticket


class _TimedPrefetches(NamedTuple):
    """All prefetches of one step."""

    num_blocks: int
    first: Ticket
    last: Ticket


class CudaTransfers:
    """Implements ``StepTransfers``."""

    def __init__(
        self,
        device: CopyDevice,
        queue: ChunkQueue,
        *,
        block_bytes: int,
        make_token_store: MakeTokenStore | None = None,
        submitter: Submitter | None = None,
    ) -> None:
        """Prepare for the first step. ``queue`` belongs to ``device``.

        Without ``make_token_store`` (kernels reach only pinned memory) blocks with new tokens are stored whole. Without
        a ``submitter`` the caller pumps the queue.
        """
        self.device = device
        self._queue = queue
        self._block_bytes = block_bytes
        self._make_token_store = make_token_store
        self._submitter = submitter
        self._step = -1
        self._computed: DeviceEvent | None = None  # of the step that ended last; None before the first has
        self._is_in_step = False
        self._prefetches: deque[_Prefetch] = deque()  # that no computation has waited for
        self._stores: Ticket | None = None
        self._store_marks: deque[_StoreMark] = deque()  # that no computation has waited for
        self._stores_open_blocks = False  # the step before stored whole what this one still fills
        self._newest_store: DeviceEvent | None = None  # that no prefetch has waited for
        self._prefetching: deque[_TimedPrefetches] = deque()
        self._stalls: deque[tuple[DeviceEvent, DeviceEvent]] = deque()

    @property
    def counts(self) -> CopyCounts:
        return self._queue.counters.to_counts()

    def begin_step(self, copies: StepCopies) -> StepWait:
        assert not self._is_in_step, "the step before has not ended"
        self._is_in_step = True
        self._step += 1
        self._put_earlier_copies_on_lanes()
        before = self.device.record(Lane.COMPUTE)
        self._wait_for_prefetches(are_all_needed=copies.abandons_prefetches)
        # Behind the kernels of all earlier steps, and what this one needs of their prefetches.
        begun = self.device.record(Lane.COMPUTE)
        if copies.saves:
            self._save(copies.saves, begun)
        if copies.store_fence is not None:
            self._wait_for_stores(through_step=self._step - copies.store_fence)
        if self._stores_open_blocks:
            self._wait_for_stores(through_step=self._step - 1)
            self._stores_open_blocks = False
        self._stalls.append((before, self.device.record(Lane.COMPUTE)))
        if copies.num_prefetches:
            self._prefetch(copies, begun)
        return StepWait(stall_s=self._take_stall_s(), prefetches=tuple(self._take_prefetch_timings()))

    def end_step(self, copies: StepCopies) -> None:
        assert self._is_in_step, "no step has begun"
        self._is_in_step = False
        self._check()
        self._computed = self.device.record(Lane.COMPUTE)
        chunks = self._chunks(copies.stores, Lane.STORE)
        if copies.token_stores:
            chunks += self._token_chunks(copies.token_stores)
        if chunks:
            self.device.wait(Lane.STORE, self._computed, Fence.STORE_AFTER_COMPUTE)
            self._stores = self._queue.put(chunks, priority=Priority.OFFLOAD, after=self._computed)
            self._wake()

    def hold_for_send(self, sent: DeviceEvent) -> None:
        """Hold other copies back until ``sent``, while the step that ended last sends its activations."""
        assert self._computed is not None, "a send before the first step's end"
        self._queue.hold_for_send(self._computed, sent)

    def close(self) -> None:
        if self._submitter is not None:
            self._submitter.close()
        self._queue.flush()
        self.device.synchronize()
        log.info("KV copies: %s", self._queue.counters)

    # -- the parts of a step --------------------------------------------------------------------------------------

    def _put_earlier_copies_on_lanes(self) -> None:
        self._check()
        self._queue.flush()
        if self._stores is not None:
            self._mark_stores(2 * self._step - 1, self._stores)
            self._stores = None

    def _save(self, saves: Sequence[BlockStore], begun: DeviceEvent) -> None:
        self.device.wait(Lane.STORE, begun, Fence.SAVE_AFTER_COMPUTE)
        ticket = self._queue.put(self._chunks(saves, Lane.STORE), priority=Priority.OFFLOAD)
        self._queue.flush()  # this step's prefetches and computation may wait for it
        self._mark_stores(2 * self._step, ticket)

    def _mark_stores(self, moment: int, ticket: Ticket) -> None:
        self._newest_store = _end(ticket)
        self._store_marks.append(_StoreMark(moment, self._newest_store))
        if len(self._store_marks) > _MAX_STORE_MARKS:
            oldest = self._store_marks.popleft()
            self.device.wait(Lane.COMPUTE, oldest.event, Fence.COMPUTE_AFTER_STORE)

    def _wait_for_prefetches(self, *, are_all_needed: bool) -> None:
        """Have computation wait for the last needed prefetch: its event covers the earlier ones on the lane."""
        last: Ticket | None = None
        while self._prefetches and (are_all_needed or self._prefetches[0].needed_by <= self._step):
            last = self._prefetches.popleft().ticket
        if last is not None:
            self.device.wait(Lane.COMPUTE, _end(last), Fence.COMPUTE_AFTER_PREFETCH)

    def _wait_for_stores(self, *, through_step: int) -> None:
        """Have computation wait for the last store through that step: its event covers the earlier ones."""
        last: DeviceEvent | None = None
        while self._store_marks and self._store_marks[0].moment <= 2 * through_step + 1:
            last = self._store_marks.popleft().event
        if last is not None:
            self.device.wait(Lane.COMPUTE, last, Fence.COMPUTE_AFTER_STORE)

    def _prefetch(self, copies: StepCopies, begun: DeviceEvent) -> None:
        self.device.wait(Lane.PREFETCH, begun, Fence.PREFETCH_AFTER_COMPUTE)
        if self._newest_store is not None:
            self.device.wait(Lane.PREFETCH, self._newest_store, Fence.PREFETCH_AFTER_STORE)
            self._newest_store = None
        by_deadline = ((self._step + 1, copies.prefetches), (self._step + 2, copies.later_prefetches))
        tickets = [
            self._put_prefetches(prefetches, needed_by=needed_by)
            for needed_by, prefetches in by_deadline
            if prefetches
        ]
        self._prefetching.append(_TimedPrefetches(copies.num_prefetches, tickets[0], tickets[-1]))
        self._wake()

    def _put_prefetches(self, prefetches: Sequence[BlockPrefetch], *, needed_by: int) -> Ticket:
        ticket = self._queue.put(
            self._chunks(prefetches, Lane.PREFETCH), priority=Priority.PREFETCH, needed_by=needed_by
        )
        self._prefetches.append(_Prefetch(needed_by, ticket))
        return ticket

    def _chunks(self, copies: Sequence[BlockPrefetch] | Sequence[BlockStore], lane: Lane) -> list[Chunk]:
        return copy_chunks(
            copies, lane=lane, block_bytes=self._block_bytes, chunk_bytes=self._queue.limits.chunk_bytes
        )

    def _token_chunks(self, stores: Sequence[TokenStore]) -> list[Chunk]:
        if self._make_token_store is not None:
            call, num_bytes = self._make_token_store(stores)
            return [Chunk(lane=Lane.STORE, work=call, num_bytes=num_bytes)]
        self._stores_open_blocks = True
        blocks = [BlockStore(source=store.source, target=store.target) for store in stores]
        return self._chunks(blocks, Lane.STORE)

    def _wake(self) -> None:
        if self._submitter is not None:
            self._submitter.wake()

    def _check(self) -> None:
        if self._submitter is not None:
            self._submitter.check()

    # -- what is known by now -------------------------------------------------------------------------------------

    def _take_stall_s(self) -> float:
        stall_s = 0.0
        while self._stalls and self.device.is_done(self._stalls[0][1]):
            stall_s += self.device.elapsed_s(*self._stalls.popleft())
        return stall_s

    def _take_prefetch_timings(self) -> list[PrefetchTiming]:
        timings: list[PrefetchTiming] = []
        while self._prefetching:
            num_blocks, first, last = self._prefetching[0]
            if first.begin is None or last.end is None or not self.device.is_done(last.end):
                break
            seconds = self.device.elapsed_s(first.begin, last.end)
            timings.append(PrefetchTiming(num_blocks=num_blocks, seconds=seconds))
            self._prefetching.popleft()
        return timings


def _end(ticket: Ticket) -> DeviceEvent:
    assert ticket.end is not None, f"{ticket.num_waiting} chunks were not submitted"
    return ticket.end
