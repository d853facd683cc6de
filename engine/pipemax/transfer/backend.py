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
from pipemax.transfer.layout import LayerSpan


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

    def begin_group(self, group: int) -> None:
        """Begin a group of layers of a step that computes in groups: it then sees all copies into this group.

        The groups come in their order, between the start and the end of the step, each ended before the next begins.
        """

    def end_group(self, copies: StepCopies, group: int) -> None:
        """Start the wave's copies into a group of layers, which the step has computed or whose kernels are enqueued."""

    def end_step(self, copies: StepCopies) -> None:
        """Start the step's stores: its KV is computed, or what computes it is enqueued."""

    def close(self) -> None:
        """Finish what is queued and stop. Safe to call twice."""


class CopyBackend(Protocol):
    """Makes copies in the order of their submission, while the caller goes on."""

    @property
    def counts(self) -> CopyCounts:
        """The counts of what has been copied so far."""

    def submit_prefetches(self, prefetches: Sequence[BlockPrefetch], span: LayerSpan | None = None) -> None:
        """Queue host → GPU copies, of whole blocks or only of these bytes of each; returns at once."""

    def submit_stores(self, stores: Sequence[BlockStore]) -> None:
        """Queue GPU → host copies of what has been computed; returns at once."""

    def wait(self) -> list[float]:
        """Wait until everything submitted is done. Return the seconds of each prefetch since the last call.

        ``TransferError`` if a copy failed.
        """

    def close(self) -> None:
        """Finish what is queued and stop. Safe to call twice."""
