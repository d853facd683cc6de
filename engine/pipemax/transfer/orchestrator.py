"""Enforce the one ordering rule of all KV copies, in one place.

    Before a step touches KV, all copies of earlier steps are done.

``begin_step`` waits for what earlier steps submitted and makes this step's saves. ``start_prefetches`` submits its
prefetches, which run while it computes, ``end_step`` its stores. Steps run first in, first out on every stage, so the
rule suffices for:

- *evicting what is in flight*: the victim's step computes, then stores, before a step that was planned later begins,
  saves the victim's last block and overwrites it;
- *prefetching*: a prefetch is done before the first step that may read its target;
- *reusing a host block*: the stores and prefetches of its former user were made in earlier steps;
- *overwriting behind the computation*: in a wave, copies into a group of layers are submitted when the step has
  computed the group, and are done, as all prefetches are, before the next step begins;
- *aborting at any moment*: nothing needs to be cancelled; what was queued for the request completes, and only then
  do its blocks see other copies.

So no completion is ever reported to the scheduler. The idea is from Section 3.4 of the paper, without its per-layer
events.
"""

import time
from collections.abc import Sequence

from pipemax.transfer.backend import CopyBackend
from pipemax.transfer.commands import CopyCounts, PrefetchTiming, StepCopies, StepWait
from pipemax.transfer.layout import LayerSpan


class Orchestrator:
    """Implements ``StepTransfers``: drives a backend through a stage's steps."""

    def __init__(self, backend: CopyBackend, groups: Sequence[LayerSpan] = ()) -> None:
        """Prepare for the first step. ``groups``: of a block's layers, in the order of their computation, for waves."""
        self._backend = backend
        self._groups = groups
        self._next_group: int | None = None  # of the step, if it computes in groups
        self._is_in_step = False
        self._prefetching: StepCopies | None = None  # the step before, if it prefetches
        self._has_unstarted = False

    @property
    def counts(self) -> CopyCounts:
        return self._backend.counts

    def begin_step(self, copies: StepCopies) -> StepWait:
        """Wait, then save."""
        assert not self._is_in_step, "the step before has not ended"
        assert self._groups or not copies.in_groups, "a step in groups of layers, which nobody watches"
        self._is_in_step = True
        self._next_group = 0 if copies.in_groups else None
        self._has_unstarted = copies.num_prefetches > 0
        begin_s = time.perf_counter()
        timings = self._finish_prefetches()
        if copies.saves:
            self._backend.submit_stores(copies.saves)
            self._backend.wait()
        stall_s = time.perf_counter() - begin_s
        return StepWait(stall_s=stall_s, prefetches=timings)

    def start_prefetches(self, copies: StepCopies) -> None:
        """Start this step's prefetches. Their targets must not be read or written by this step."""
        assert self._is_in_step, "no step has begun"
        self._has_unstarted = False
        if copies.num_prefetches:
            self._backend.submit_prefetches([*copies.prefetches, *copies.later_prefetches])
            self._prefetching = copies

    def begin_group(self, group: int) -> None:
        """Begin a group of layers; all earlier copies were done when the step began."""
        assert group == self._next_group, (group, self._next_group)

    def end_group(self, copies: StepCopies, group: int) -> None:
        """Start the wave's copies into a group of layers, which this step has computed."""
        assert group == self._next_group, (group, self._next_group)
        self._next_group = group + 1
        if copies.wave_prefetches:
            self._backend.submit_prefetches(copies.wave_prefetches, self._groups[group])
            self._prefetching = copies

    def end_step(self, copies: StepCopies) -> None:
        """Start the stores of this step, whose KV is computed."""
        assert self._is_in_step, "no step has begun"
        assert self._next_group in (None, len(self._groups)), f"the step ends in group {self._next_group}"
        assert copies.in_groups or not copies.wave_prefetches, "a wave follows a step that computes in groups"
        assert not self._has_unstarted, "the step's prefetches were not started"
        assert not copies.token_stores, "kernels on a CPU order a block's tokens: it moves whole"
        self._is_in_step = False
        if copies.stores:
            self._backend.submit_stores(copies.stores)

    def close(self) -> None:
        self._backend.close()

    def _finish_prefetches(self) -> tuple[PrefetchTiming, ...]:
        prefetch_s, copies = self._backend.wait(), self._prefetching
        self._prefetching = None
        if copies is None:
            return ()
        num_blocks = copies.num_prefetches + len(copies.wave_prefetches)
        return (PrefetchTiming(step_id=copies.step_id, num_blocks=num_blocks, seconds=sum(prefetch_s)),)
