"""Overwrite the target of every prefetch with NaN before the copy, so that no step can live on what was there before.

A block that a request comes back to may still hold its KV by chance: then a copy that was left out, or came too late,
would go unnoticed. Here each step that prefetches is preceded by one that computes nothing but the poison:

    step t, poisoned    begin (saves of t) | NaN into the targets of t's prefetches | end
    step t              begin | start (prefetches of t) | the model's kernels | end (stores of t)

By the transfers' own rules the poison is written after everything that the targets are still read for, and t's
prefetches come after it. Each step waits for all stores and prefetches, so this is no measure of speed. What a wave
overwrites, the step itself reads: there the poison of each group of layers comes when the step has computed the group.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch

from pipemax.transfer.backend import StepTransfers
from pipemax.transfer.commands import CopyCounts, StepCopies, StepWait
from pipemax.transfer.layout import LayerSpan

NAN_BYTE = 0xFF
"""All bits set is NaN in every KV dtype. In e4m3, vLLM's kernels for CPUs read it as -480, beyond every value."""


class PoisonedPrefetches:
    """Implements ``StepTransfers`` over another one whose GPU pool is ``gpu_rows``: ``(num_blocks, block_bytes)``."""

    def __init__(
        self, inner: StepTransfers, gpu_rows: torch.Tensor, groups: Sequence[LayerSpan] = ()
    ) -> None:
        """Poison from now on. ``groups``: of layers of a block, in the order of their computation, for waves."""
        self._inner = inner
        self._gpu_rows = gpu_rows
        self._groups = groups

    @property
    def counts(self) -> CopyCounts:
        return self._inner.counts

    def begin_step(self, copies: StepCopies) -> StepWait:
        targets = [prefetch.target for prefetch in (*copies.prefetches, *copies.later_prefetches)]
        if not targets:
            return self._inner.begin_step(replace(copies, store_fence=0))
        waited = self._inner.begin_step(StepCopies(saves=copies.saves, abandons_prefetches=True))
        self._gpu_rows[self._blocks(targets)] = NAN_BYTE
        self._inner.end_step(StepCopies())
        wait = self._inner.begin_step(replace(copies, saves=(), store_fence=0))
        return StepWait(
            stall_s=waited.stall_s + wait.stall_s, prefetches=(*waited.prefetches, *wait.prefetches)
        )

    def start_prefetches(self, copies: StepCopies) -> None:
        self._inner.start_prefetches(replace(copies, prefetch_fence=0))

    def begin_group(self, group: int) -> None:
        self._inner.begin_group(group)

    def end_group(self, copies: StepCopies, group: int) -> None:
        if copies.wave_prefetches:
            first_byte, num_bytes = self._groups[group]
            part = self._gpu_rows[:, first_byte : first_byte + num_bytes]
            part[self._blocks([prefetch.target for prefetch in copies.wave_prefetches])] = NAN_BYTE
        self._inner.end_group(replace(copies, prefetch_fence=0), group)

    def end_step(self, copies: StepCopies) -> None:
        self._inner.end_step(copies)

    def _blocks(self, targets: Sequence[int]) -> torch.Tensor:
        return torch.tensor(targets, device=self._gpu_rows.device)

    def close(self) -> None:
        self._inner.close()
