"""The thread that submits copies while the model's thread goes on: about half a microsecond of CPU per copy.

Its error is raised again in ``check``, where the caller can act on it. It knows nothing of steps.
"""

import threading
import time

from pipemax.domain.errors import TransferError
from pipemax.transfer.cuda.chunk_queue import ChunkQueue

_POLL_S = 5e-4
"""Poll interval while chunks wait for room: less than a chunk's time on PCIe 5, so that the link stays busy."""


class Submitter:
    """Pumps a queue from ``wake`` until nothing waits in it."""

    def __init__(self, queue: ChunkQueue) -> None:
        self._queue = queue
        self._work = threading.Event()
        self._is_closed = False
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="kv-submit", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Start pumping: something was put into the queue."""
        self._work.set()

    def check(self) -> None:
        """Raise ``TransferError`` if the thread has failed; it then submits nothing more."""
        if self._error is not None:
            raise TransferError(f"a KV copy could not be submitted: {self._error}") from self._error

    def close(self) -> None:
        """Stop; what waits in the queue stays there. Safe to call twice."""
        self._is_closed = True
        self._work.set()
        self._thread.join()

    def _run(self) -> None:
        while True:
            self._work.wait()
            if self._is_closed:
                return
            self._work.clear()
            try:
                while self._queue.num_waiting and not self._is_closed:
                    if self._queue.pump() == 0:
                        time.sleep(_POLL_S)
            except Exception as error:
                self._error = error
                return
