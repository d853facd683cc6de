"""The copies of a stage's steps on a GPU: the ordering rule of ``orchestrator``, with events instead of waiting.

    step t    begin                                           start_prefetches              end
    compute   | wait for the prefetches that t needs | inputs | the model's kernels ─────── |
    prefetch                                    | wait for those, and stores | prefetches of t, for t + 1, then t + 2
    store     | saves of t |                                                  | wait for the compute | stores of t

A GPU has one copy engine for each direction. Inputs of t that came to it behind t's prefetches would wait for all of
them, and t with them. So prefetches wait for what is on the compute lane when they start: earlier steps and inputs.

Everything is submitted at once, behind its fences, however many steps the host is ahead of the device: the device's
own progress paces the copies, and the order of submission on the prefetch lane is that of the deadlines. The paper's
priority queues (§3.4.2, "Demand-Priority Transfer Orchestration") hold KV copies back around sends instead; a host that
is ahead of the device cannot do that without making prefetches wait for the very step that they should overlap with
(``docs/transfer.md``).

The caller never waits for the device. Every wait is named (``device.Fence``); a checker shows that each is needed and
that together they suffice (``test_happens_before.py``). A store needs no wait for earlier prefetches that read the
host block it overwrites: it comes after its step's computation, which comes after those prefetches. Only prefetches
for later steps may still run at the same time, and they read blocks that nobody overwrites unless the step
``abandons_prefetches``.
"""

import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from pipemax.domain.plan import StepId
from pipemax.domain.units import GIB
from pipemax.transfer.commands import (
    BlockPrefetch,
    BlockStore,
    CopyCounts,
    PrefetchTiming,
    StepCopies,
    StepWait,
    TokenStore,
)
from pipemax.transfer.cuda.copy_runs import copy_runs
from pipemax.transfer.cuda.device import CopyDevice, DeviceEvent, Fence, KernelCall, Lane

log = logging.getLogger(__name__)

_MAX_STORE_MARKS = 256
"""Maximum of store events kept for fences. Beyond it, computation waits for the oldest, which was done long ago."""

_FIRST_SHARE = 4
"""One block in so many is copied before a prefetch's time begins. Submitting a block takes a fifth of its copy."""

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
    end: DeviceEvent


class _TimedPrefetches(NamedTuple):
    """All prefetches of one step."""

    step_id: StepId | None
    num_blocks: int
    num_timed: int
    """Blocks copied between the two events."""
    begin: DeviceEvent
    end: DeviceEvent


class CudaTransfers:
    """Implements ``StepTransfers``."""

    def __init__(
        self, device: CopyDevice, *, block_bytes: int, make_token_store: MakeTokenStore | None = None
    ) -> None:
        """Prepare for the first step; without ``make_token_store``, of steps that store whole blocks only."""
        self.device = device
        self._block_bytes = block_bytes
        self._make_token_store = make_token_store
        self._step = -1
        self._is_in_step = False
        self._has_unstarted = False
        self._prefetches: deque[_Prefetch] = deque()  # that no computation has waited for
        self._store_marks: deque[_StoreMark] = deque()  # that no computation has waited for
        self._prefetch_marks: deque[_StoreMark] = deque()  # the same, that no prefetch has waited for
        self._prefetching: deque[_TimedPrefetches] = deque()
        self._stalls: deque[tuple[DeviceEvent, DeviceEvent]] = deque()
        self._loaded_bytes = self._stored_bytes = 0

    @property
    def counts(self) -> CopyCounts:
        return CopyCounts(loaded_bytes=self._loaded_bytes, stored_bytes=self._stored_bytes)

    def begin_step(self, copies: StepCopies) -> StepWait:
        assert not self._is_in_step, "the step before has not ended"
        self._is_in_step = True
        self._has_unstarted = copies.num_prefetches > 0
        self._step += 1
        self._wait_for_prefetches(are_all_needed=copies.abandons_prefetches)
        if copies.saves:
            # Behind the kernels of all earlier steps, and what this one needs of their prefetches.
            self.device.wait(Lane.STORE, self.device.record(Lane.COMPUTE), Fence.SAVE_AFTER_COMPUTE)
            self._store_blocks(copies.saves)
            self._mark_stores(2 * self._step)
        if copies.store_fence is not None:
            through_step = self._step - copies.store_fence
            if (stored := _last_store(self._store_marks, through_step)) is not None:
                self._stall(stored, Fence.COMPUTE_AFTER_STORE)
        return StepWait(stall_s=self._take_stall_s(), prefetches=tuple(self._take_prefetch_timings()))

    def start_prefetches(self, copies: StepCopies) -> None:
        assert self._is_in_step, "no step has begun"
        self._has_unstarted = False
        if copies.num_prefetches:
            self._prefetch(copies)

    def end_step(self, copies: StepCopies) -> None:
        assert self._is_in_step, "no step has begun"
        assert not self._has_unstarted, "the step's prefetches were not started"
        self._is_in_step = False
        if not copies.stores and not copies.token_stores:
            return
        computed = self.device.record(Lane.COMPUTE)
        self.device.wait(Lane.STORE, computed, Fence.STORE_AFTER_COMPUTE)
        if copies.stores:
            self._store_blocks(copies.stores)
        if copies.token_stores:
            self._store_tokens(copies.token_stores)
        self._mark_stores(2 * self._step + 1)

    def close(self) -> None:
        self.device.synchronize()
        log.info(
            "KV copies: %.2f GiB prefetched, %.2f GiB stored",
            self._loaded_bytes / GIB,
            self._stored_bytes / GIB,
        )

    # -- the parts of a step --------------------------------------------------------------------------------------

    def _store_blocks(self, stores: Sequence[BlockStore]) -> None:
        self.device.copy(Lane.STORE, copy_runs(stores, lane=Lane.STORE, block_bytes=self._block_bytes))
        self._stored_bytes += len(stores) * self._block_bytes

    def _store_tokens(self, stores: Sequence[TokenStore]) -> None:
        assert self._make_token_store is not None, "single tokens are stored by a kernel"
        call, num_bytes = self._make_token_store(stores)
        self.device.launch(Lane.STORE, call)
        self._stored_bytes += num_bytes

    def _mark_stores(self, moment: int) -> None:
        mark = _StoreMark(moment, self.device.record(Lane.STORE))
        for marks, lane, fence in (
            (self._store_marks, Lane.COMPUTE, Fence.COMPUTE_AFTER_STORE),
            (self._prefetch_marks, Lane.PREFETCH, Fence.PREFETCH_AFTER_STORE),
        ):
            marks.append(mark)
            if len(marks) > _MAX_STORE_MARKS:
                self.device.wait(lane, marks.popleft().event, fence)

    def _wait_for_prefetches(self, *, are_all_needed: bool) -> None:
        """Have computation wait for the last needed prefetch: its event covers the earlier ones on the lane."""
        last: DeviceEvent | None = None
        while self._prefetches and (are_all_needed or self._prefetches[0].needed_by <= self._step):
            last = self._prefetches.popleft().end
        if last is not None:
            self._stall(last, Fence.COMPUTE_AFTER_PREFETCH)

    def _stall(self, event: DeviceEvent, reason: Fence) -> None:
        """Have computation wait, and time only that: between two marks further apart a late host's work would count."""
        before = self.device.record(Lane.COMPUTE)
        self.device.wait(Lane.COMPUTE, event, reason)
        self._stalls.append((before, self.device.record(Lane.COMPUTE)))

    def _prefetch(self, copies: StepCopies) -> None:
        ready = self.device.record(Lane.COMPUTE)
        self.device.wait(Lane.PREFETCH, ready, Fence.PREFETCH_AFTER_COMPUTE)
        if copies.prefetch_fence is not None:
            through_step = self._step - copies.prefetch_fence
            if (stored := _last_store(self._prefetch_marks, through_step)) is not None:
                self.device.wait(Lane.PREFETCH, stored, Fence.PREFETCH_AFTER_STORE)
        # The lane copies the first blocks while the host submits the others, so that the time of those is the link's.
        num_first = len(copies.prefetches) // _FIRST_SHARE
        self._submit_prefetches(copies.prefetches[:num_first], needed_by=self._step + 1)
        begin = self.device.record(Lane.PREFETCH)
        self._submit_prefetches(copies.prefetches[num_first:], needed_by=self._step + 1)
        self._submit_prefetches(copies.later_prefetches, needed_by=self._step + 2)
        end = self._prefetches[-1].end
        num_timed = copies.num_prefetches - num_first
        self._prefetching.append(
            _TimedPrefetches(copies.step_id, copies.num_prefetches, num_timed, begin, end)
        )

    def _submit_prefetches(self, prefetches: Sequence[BlockPrefetch], *, needed_by: int) -> None:
        if not prefetches:
            return
        runs = copy_runs(prefetches, lane=Lane.PREFETCH, block_bytes=self._block_bytes)
        self.device.copy(Lane.PREFETCH, runs)
        self._prefetches.append(_Prefetch(needed_by, self.device.record(Lane.PREFETCH)))
        self._loaded_bytes += len(prefetches) * self._block_bytes

    # -- what is known by now -------------------------------------------------------------------------------------

    def _take_stall_s(self) -> float:
        stall_s = 0.0
        while self._stalls and self.device.is_done(self._stalls[0][1]):
            stall_s += self.device.elapsed_s(*self._stalls.popleft())
        return stall_s

    def _take_prefetch_timings(self) -> list[PrefetchTiming]:
        timings: list[PrefetchTiming] = []
        while self._prefetching and self.device.is_done(self._prefetching[0].end):
            step_id, num_blocks, num_timed, begin, end = self._prefetching.popleft()
            seconds = self.device.elapsed_s(begin, end) * num_blocks / num_timed
            timings.append(PrefetchTiming(step_id=step_id, num_blocks=num_blocks, seconds=seconds))
        return timings


def _last_store(marks: deque[_StoreMark], through_step: int) -> DeviceEvent | None:
    """Take the marks of all stores through that step. Return the last one's event, which covers the earlier ones."""
    last: DeviceEvent | None = None
    while marks and marks[0].moment <= 2 * through_step + 1:
        last = marks.popleft().event
    return last
