"""The CPU's part of the per-layer offload: a thread that puts staged tokens into their blocks of the host pool.

Its errors are raised again by the next call of the model's thread. It knows nothing of steps; code that reads or
writes host blocks in other ways must ask it first (``wait_for``).
"""

import queue
import threading
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch

from pipemax.domain.errors import TransferError
from pipemax.domain.units import HostBlockId
from pipemax.transfer.cuda.launch_checks import TokenTable
from pipemax.transfer.per_layer import PerLayerOffload

_POLL_S = 1.0
"""How often a waiting caller checks that the thread still lives."""


@dataclass(frozen=True, slots=True, eq=False)
class _Job:
    staging: PerLayerOffload
    tokens: TokenTable
    host_blocks: frozenset[int]
    done: threading.Event = field(default_factory=threading.Event)


class PackingThread:
    """Packs steps first in, first out, for one caller."""

    def __init__(self, host_rows: torch.Tensor, stagings: Sequence[PerLayerOffload]) -> None:
        """Start the thread. ``host_rows``: ``(num_blocks, block_bytes)`` bytes, the pool to pack into."""
        self._host_rows = host_rows
        self._free: queue.SimpleQueue[PerLayerOffload] = queue.SimpleQueue()
        for staging in stagings:
            self._free.put(staging)
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._pending: deque[_Job] = deque()
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="kv-pack", daemon=True)
        self._thread.start()

    def take_staging(self) -> PerLayerOffload:
        """Wait for a free staging for one step; ``submit`` gives it back. ``TransferError`` as in ``wait_for``."""
        while True:
            self._check()
            try:
                return self._free.get(timeout=_POLL_S)
            except queue.Empty:
                continue

    def submit(self, staging: PerLayerOffload, tokens: TokenTable) -> None:
        """Queue a step whose layers are all in ``staging``, or their copies are enqueued. Returns at once."""
        job = _Job(staging, tokens, frozenset(tokens[:, 2].tolist()))
        self._pending.append(job)
        self._jobs.put(job)

    def wait_for(self, host_blocks: Iterable[HostBlockId]) -> None:
        """Wait until nothing is left to be put into these blocks. ``TransferError`` if packing has failed."""
        wanted = set(host_blocks)
        last = next((job for job in reversed(self._pending) if not wanted.isdisjoint(job.host_blocks)), None)
        if last is not None:
            self._wait(last)
        while self._pending and self._pending[0].done.is_set():
            self._pending.popleft()
        self._check()

    def close(self) -> None:
        """Finish what was submitted and stop. Safe to call twice."""
        if self._thread.is_alive():
            self._jobs.put(None)
            self._thread.join()

    def _wait(self, job: _Job) -> None:
        while not job.done.wait(timeout=_POLL_S):
            self._check()

    def _check(self) -> None:
        if self._error is not None:
            raise TransferError(f"new KV could not be put into its blocks: {self._error}") from self._error
        if not self._thread.is_alive():
            raise TransferError("the packing thread has ended with a step under way")

    # Run on the packing thread.

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job.staging.wait()
                job.staging.pack(self._host_rows, torch.from_numpy(job.tokens))
            except Exception as error:  # raised again in _check, where the caller can act on it
                self._error = self._error or error
            job.done.set()
            self._free.put(job.staging)
