"""The interfaces of a stage's copies: the steps' view, and the backend that moves bytes where a caller waits."""

from collections.abc import Sequence
from typing import Protocol

from pipemax.transfer.commands import (
    BlockPrefetch,
    BlockStore,
    CopyCounts,
    StepCopies,
    StepWait,
)


class StepTransfers(Protocol):
    """The copies of a stage's steps: ``Orchestrator`` over a CPU, ``CudaTransfers`` on a GPU.

    There is one caller, strictly begin, start, end, begin, start, end; a step without prefetches may leave the start
    out. ``TransferError`` if a copy has failed.
    """

    @property
    def counts(self) -> CopyCounts:
        """The counts of what has been submitted so far."""

    def begin_step(self, copies: StepCopies) -> StepWait:
        """Begin a step, before it touches KV: it then sees all copies of earlier steps."""

    def start_prefetches(self, copies: StepCopies) -> None:
        """Start the step's prefetches, once its inputs are on their way: a copy engine takes what comes first."""

    def end_step(self, copies: StepCopies) -> None:
        """Start the step's stores: its KV is computed, or what computes it is enqueued."""

    def close(self) -> None:
        """Finish what is queued and stop. Safe to call twice."""


class CopyBackend(Protocol):
    """Makes copies in the order of their submission, while the caller goes on."""

    @property
    def counts(self) -> CopyCounts:
        """The counts of what has been copied so far."""

    def submit_prefetches(self, prefetches: Sequence[BlockPrefetch]) -> None:
        """Queue host → GPU copies; returns at once."""

    def submit_stores(self, stores: Sequence[BlockStore]) -> None:
        """Queue GPU → host copies of what has been computed; returns at once."""

    def wait(self) -> list[float]:
        """Wait until everything submitted is done. Return the seconds of each prefetch since the last call.

        ``TransferError`` if a copy failed.
        """

    def close(self) -> None:
        """Finish what is queued and stop. Safe to call twice."""
