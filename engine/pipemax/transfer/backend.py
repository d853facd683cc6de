"""What a stage asks of its copies, and what moves the bytes where copies are waited for one by one."""

from collections.abc import Sequence
from typing import Protocol

from pipemax.transfer.commands import (
    BlockPrefetch,
    BlockStore,
    CopyCounts,
    PrefetchTiming,
    StepCopies,
    StepWait,
)


class StepTransfers(Protocol):
    """The copies of a stage's steps: ``Orchestrator`` over a CPU, ``CudaTransfers`` on a GPU.

    One caller, strictly begin, end, begin, end. ``TransferError`` where a copy has failed.
    """

    @property
    def counts(self) -> CopyCounts:
        """Of what has been submitted so far."""

    def begin_step(self, copies: StepCopies) -> StepWait:
        """Before the step touches KV: from here on it sees all copies of earlier steps. Its prefetches start."""

    def end_step(self, copies: StepCopies) -> None:
        """The step's KV is computed, or what computes it is enqueued: start its stores."""

    def close(self) -> None:
        """Finish what is queued and stop. Safe to call twice."""


class CopyBackend(Protocol):
    """Copies in the order in which they were submitted, beside whoever submits them."""

    @property
    def counts(self) -> CopyCounts:
        """Of what has been copied so far."""

    def submit_prefetches(self, prefetches: Sequence[BlockPrefetch]) -> None:
        """Queue host → GPU copies; returns at once."""

    def submit_stores(self, stores: Sequence[BlockStore]) -> None:
        """Queue GPU → host copies of what has been computed; returns at once."""

    def wait(self) -> list[PrefetchTiming]:
        """Until all that was submitted is done. The prefetches' times since the last call, one for each submission.

        ``TransferError`` where a copy failed.
        """

    def close(self) -> None:
        """Finish what is queued and stop. Safe to call twice."""
