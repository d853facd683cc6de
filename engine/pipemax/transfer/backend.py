"""What moves the bytes. The CPU backend is the first; one for CUDA fits behind the same five words."""

from collections.abc import Sequence
from typing import Protocol

from pipemax.transfer.commands import BlockLoad, BlockStore, LoadTiming


class CopyBackend(Protocol):
    """Copies in the order in which they were submitted, beside whoever submits them."""

    def submit_loads(self, loads: Sequence[BlockLoad]) -> None:
        """Queue host → GPU copies; returns at once."""

    def submit_stores(self, stores: Sequence[BlockStore]) -> None:
        """Queue GPU → host copies of what has been computed; returns at once."""

    def wait(self) -> list[LoadTiming]:
        """Until all that was submitted is done. The loads' times since the last call, one for each submission.

        ``TransferError`` where a copy failed.
        """

    def close(self) -> None:
        """Finish what is queued and stop. Safe to call twice."""
