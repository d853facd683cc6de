"""The copies of a stage's steps on a GPU: the ordering rule of ``orchestrator``, with events instead of waiting.

    step t    begin                                           start_prefetches              end
    compute   | wait for the prefetches that t needs | inputs | the model's kernels ─────── |
    prefetch                                    | wait for those, and stores | prefetches of t, for t + 1, then t + 2
    store     | saves of t |                                                  | wait for the compute | stores of t

A GPU has one copy engine for each direction. Inputs of t that came to it behind t's prefetches would wait for all of
them, and t with them. So prefetches wait for what is on the compute lane when they start: earlier steps and inputs.

A step that computes in groups of layers may also overwrite, behind its computation, blocks that it reads itself:

    step t    begin_group 0                end_group 0   begin_group 1                end_group 1
    compute   | wait for 0 of t − 1 | kernels of group 0 | wait for 1 of t − 1 | kernels of group 1 | …
    prefetch                                             | copies into group 0 of t | copies into group 1 of t | …

A wave's copies into a group have a step's time less one group's to be there: t + 1 waits for them when it begins it.

Everything is submitted at once, behind its fences, however many steps the host is ahead of the device: the device's
own progress paces the copies, and the order of submission on the prefetch lane is that of the deadlines. The paper's
priority queues (§3.4.2, "Demand-Priority Transfer Orchestration") hold KV copies back around sends instead; a host that
is ahead of the device cannot do that without making prefetches wait for the very step that they should overlap with
(``transfer/README.md``).

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
from pipemax.transfer.cuda.copy_runs import CopyRuns, copy_runs, part_copies
from pipemax.transfer.cuda.device import CopyDevice, DeviceEvent, Fence, KernelCall, Lane
from pipemax.transfer.cuda.pieces import submit_pieces
from pipemax.transfer.layout import LayerSpan

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
    """The prefetches of one step that start with it, or those of its wave."""

    step_id: StepId | None
    num_blocks: int
    num_timed: int
    """Blocks copied within the times."""
    times: list[tuple[DeviceEvent, DeviceEvent]]
    """Begin and end; of a wave, those of each group."""


class CudaTransfers:
    """Implements ``StepTransfers``."""

    def __init__(
        self,
        device: CopyDevice,
        *,
        block_bytes: int,
        make_token_store: MakeTokenStore | None = None,
        groups: Sequence[LayerSpan] = (),
        piece_bytes: int | None = None,
    ) -> None:
        """Prepare for the first step; without ``make_token_store``, of steps that store whole blocks only.

        ``groups``: the groups of layers of a block in the order in which steps compute them; without them there are no
        waves. ``piece_bytes``: prefetches go in pieces of at most so many bytes, for activations that come by the same
        copy engine (``pieces``); None submits them in one call.
        """
        self.device = device
        self._block_bytes = block_bytes
        self._make_token_store = make_token_store
        self._groups = groups
        self._piece_bytes = piece_bytes
        self._step = -1
        self._is_in_step = False
        self._has_unstarted = False
        self._prefetches: deque[_Prefetch] = deque()  # that no computation has waited for
        self._store_marks: deque[_StoreMark] = deque()  # that no computation has waited for
        self._prefetch_marks: deque[_StoreMark] = deque()  # the same, that no prefetch has waited for
        self._prefetching: deque[_TimedPrefetches] = deque()
        self._next_group: int | None = None  # of the step, if it computes in groups
        # By group, of the last wave there, which no computation has waited for.
        self._wave_ends: dict[int, DeviceEvent] = {}
        self._wave: _TimedPrefetches | None = None  # of the step
        self._stalls: deque[tuple[DeviceEvent, DeviceEvent]] = deque()
        self._loaded_bytes = self._stored_bytes = 0

    @property
    def counts(self) -> CopyCounts:
        return CopyCounts(loaded_bytes=self._loaded_bytes, stored_bytes=self._stored_bytes)

    def begin_step(self, copies: StepCopies) -> StepWait:
        assert not self._is_in_step, "the step before has not ended"
        assert self._groups or not copies.in_groups, "a step in groups of layers, which nobody watches"
        self._is_in_step = True
        self._has_unstarted = copies.num_prefetches > 0
        self._step += 1
        self._next_group = 0 if copies.in_groups else None
        self._wave = None
        self._wait_for_prefetches(are_all_needed=copies.abandons_prefetches)
        if not copies.in_groups:
            self._wait_for_waves()
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

    def begin_group(self, group: int) -> None:
        """Begin a group of layers of a step that computes in groups, before its kernels are enqueued.

        The groups come in their order, each ended before the next one begins.
        """
        assert group == self._next_group, (group, self._next_group)
        if (copied := self._wave_ends.pop(group, None)) is not None:
            self._stall(copied, Fence.GROUP_AFTER_WAVE)

    def end_group(self, copies: StepCopies, group: int) -> None:
        """Start the wave's copies into a group of layers, whose kernels are enqueued."""
        assert group == self._next_group, (group, self._next_group)
        self._next_group = group + 1
        if not copies.wave_prefetches:
            return
        self.device.wait(Lane.PREFETCH, self.device.record(Lane.COMPUTE), Fence.WAVE_AFTER_GROUP)
        self._let_prefetches_wait_for_stores(copies)
        begin = self.device.record(Lane.PREFETCH)
        span = self._groups[group]
        self._copy_to_gpu(
            part_copies(copies.wave_prefetches, span, lane=Lane.PREFETCH, block_bytes=self._block_bytes)
        )
        end = self._wave_ends[group] = self.device.record(Lane.PREFETCH)
        num_blocks = len(copies.wave_prefetches)
        self._loaded_bytes += num_blocks * span.num_bytes
        if self._wave is None:
            self._wave = _TimedPrefetches(copies.step_id, num_blocks, num_blocks, [])
            self._prefetching.append(self._wave)
        self._wave.times.append((begin, end))

    def end_step(self, copies: StepCopies) -> None:
        assert self._is_in_step, "no step has begun"
        assert not self._has_unstarted, "the step's prefetches were not started"
        assert self._next_group in (None, len(self._groups)), f"the step ends in group {self._next_group}"
        assert copies.in_groups or not copies.wave_prefetches, "a wave follows a step that computes in groups"
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

    def _wait_for_waves(self) -> None:
        """Have computation wait for the copies of all waves: the last event covers the earlier ones on the lane."""
        if self._wave_ends:
            self._stall([*self._wave_ends.values()][-1], Fence.GROUP_AFTER_WAVE)
            self._wave_ends.clear()

    def _stall(self, event: DeviceEvent, reason: Fence) -> None:
        """Have computation wait, and time only that: between two marks further apart a late host's work would count."""
        before = self.device.record(Lane.COMPUTE)
        self.device.wait(Lane.COMPUTE, event, reason)
        self._stalls.append((before, self.device.record(Lane.COMPUTE)))

    def _prefetch(self, copies: StepCopies) -> None:
        ready = self.device.record(Lane.COMPUTE)
        self.device.wait(Lane.PREFETCH, ready, Fence.PREFETCH_AFTER_COMPUTE)
        self._let_prefetches_wait_for_stores(copies)
        # The lane copies the first blocks while the host submits the others, so that the time of those is the link's.
        num_first = len(copies.prefetches) // _FIRST_SHARE
        self._submit_prefetches(copies.prefetches[:num_first], needed_by=self._step + 1)
        begin = self.device.record(Lane.PREFETCH)
        self._submit_prefetches(copies.prefetches[num_first:], needed_by=self._step + 1)
        self._submit_prefetches(copies.later_prefetches, needed_by=self._step + 2)
        end = self._prefetches[-1].end
        num_timed = copies.num_prefetches - num_first
        self._prefetching.append(
            _TimedPrefetches(copies.step_id, copies.num_prefetches, num_timed, [(begin, end)])
        )

    def _let_prefetches_wait_for_stores(self, copies: StepCopies) -> None:
        if copies.prefetch_fence is not None:
            through_step = self._step - copies.prefetch_fence
            if (stored := _last_store(self._prefetch_marks, through_step)) is not None:
                self.device.wait(Lane.PREFETCH, stored, Fence.PREFETCH_AFTER_STORE)

    def _submit_prefetches(self, prefetches: Sequence[BlockPrefetch], *, needed_by: int) -> None:
        if not prefetches:
            return
        self._copy_to_gpu(copy_runs(prefetches, lane=Lane.PREFETCH, block_bytes=self._block_bytes))
        self._prefetches.append(_Prefetch(needed_by, self.device.record(Lane.PREFETCH)))
        self._loaded_bytes += len(prefetches) * self._block_bytes

    def _copy_to_gpu(self, runs: CopyRuns) -> None:
        if self._piece_bytes is None:
            self.device.copy(Lane.PREFETCH, runs)
        else:
            submit_pieces(self.device, runs, self._piece_bytes)

    # -- what is known by now -------------------------------------------------------------------------------------

    def _take_stall_s(self) -> float:
        stall_s = 0.0
        while self._stalls and self.device.is_done(self._stalls[0][1]):
            stall_s += self.device.elapsed_s(*self._stalls.popleft())
        return stall_s

    def _take_prefetch_timings(self) -> list[PrefetchTiming]:
        timings: list[PrefetchTiming] = []
        while self._prefetching and self._is_over(self._prefetching[0]):
            step_id, num_blocks, num_timed, times = self._prefetching.popleft()
            seconds = sum(self.device.elapsed_s(*time) for time in times) * num_blocks / num_timed
            timings.append(PrefetchTiming(step_id=step_id, num_blocks=num_blocks, seconds=seconds))
        return timings

    def _is_over(self, prefetches: _TimedPrefetches) -> bool:
        is_submitted = prefetches is not self._wave or self._next_group == len(self._groups)
        return is_submitted and self.device.is_done(prefetches.times[-1][1])


def _last_store(marks: deque[_StoreMark], through_step: int) -> DeviceEvent | None:
    """Take the marks of all stores through that step. Return the last one's event, which covers the earlier ones."""
    last: DeviceEvent | None = None
    while marks and marks[0].moment <= 2 * through_step + 1:
        last = marks.popleft().event
    return last
