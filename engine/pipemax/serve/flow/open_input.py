"""Tell whether more rows may come, how many and of what kind, from the open streams and from what the driver says.

The end of a partition is not the end of the table: between two tasks of an executor there is a gap. So input counts as
open for a while after a stream has closed, unless the job's driver has said that no row is left. A stream that has
sent everything and waits for its rows holds its task's slot: nothing can take its place before it closes. This module
knows nothing of engines.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence

from pipemax.api import GenerationRequest
from pipemax.domain.units import ceil_div
from pipemax.wire import JobOutlook

_GAP_S = 2.0
"""Time for which input counts as open after a stream has closed, if nothing is known of the job."""
_LONG_GAP_S = 10.0
"""The same if the job has rows left, here or elsewhere."""

_TRAITS: Mapping[str, Callable[[GenerationRequest], bool]] = {
    "is_constrained": lambda row: row.sampling.is_constrained,
    "has_images": lambda row: bool(row.images),
    "may_not_speculate": lambda row: not row.sampling.can_speculate,
}
"""What a row may have, by its name in ``tuning.remembered.TableKind``; and whether speculation may change it."""


class InputWatch:
    """Watches whether input is open. Thread-safe."""

    def __init__(self, received: Callable[[str], int], clock: Callable[[], float] = time.monotonic) -> None:
        """Ask ``received`` how many rows of a job have come so far."""
        self._received = received
        self._clock = clock
        self._lock = threading.Lock()
        self._streams: dict[int, str] = {}  # number -> job, of those whose input has not ended
        self._closed_job: str | None = None
        self._closed_at_s = float("-inf")
        self._outlooks: dict[str, JobOutlook] = {}
        self._shares: dict[str, int] = {}  # job -> rows received once this engine has had its share
        self._traits: dict[str, set[str]] = {}  # job -> those of _TRAITS that some of its rows have

    def open(self, number: int, job_id: str) -> None:
        with self._lock:
            self._streams[number] = job_id

    def end(self, number: int) -> None:
        """Record that the stream's input has ended; its rows may still run."""
        with self._lock:
            self._streams.pop(number, None)

    def close(self, number: int, job_id: str) -> None:
        """Record that the stream is gone: another may take its place."""
        with self._lock:
            self._streams.pop(number, None)
            self._closed_job, self._closed_at_s = job_id, self._clock()
            self._forget_others()

    def note_sent(self, job_id: str, requests: Sequence[GenerationRequest]) -> None:
        """Take rows of a job that are about to go to the engine."""
        with self._lock:
            known = self._traits.setdefault(job_id, set())
            known |= {name for name, has in _TRAITS.items() if name not in known and any(map(has, requests))}

    def hear(self, outlook: JobOutlook) -> None:
        """Take in what the driver says of a job, as of a second or two ago."""
        share = ceil_div(outlook.rows_left, max(1, outlook.engines))
        with self._lock:
            self._outlooks[outlook.job_id] = outlook
            self._shares[outlook.job_id] = self._received(outlook.job_id) + share

    def is_open(self) -> bool:
        with self._lock:
            if self._streams:
                return True
            outlook = self._outlooks.get(self._closed_job or "")
            gap_s = _GAP_S if outlook is None else _LONG_GAP_S if outlook.rows_left else 0.0
            return self._clock() - self._closed_at_s < gap_s

    def rows_left(self) -> int | None:
        """Return how many more rows this engine should take: its even share of what the jobs have left.

        ``None`` if that bounds nothing: there is no other engine, or a job has not said how many rows it has left.
        """
        with self._lock:
            outlooks = [self._outlooks.get(job_id) for job_id in set(self._streams.values())]
            if any(outlook is None or outlook.engines < 2 for outlook in outlooks):
                return None
            return self._share_left()

    def share_left(self) -> int | None:
        """Return the same with other engines or without; ``None`` if a job has not said how many rows it has left."""
        with self._lock:
            return self._share_left()

    def jobs(self) -> frozenset[str]:
        """Return the jobs whose input is open."""
        with self._lock:
            return frozenset(self._streams.values())

    def traits(self) -> frozenset[str]:
        """Return what rows of the jobs whose input is open have had, by their names in ``_TRAITS``."""
        with self._lock:
            return frozenset().union(*(self._traits.get(job, ()) for job in self._streams.values()))

    def _share_left(self) -> int | None:
        jobs = set(self._streams.values())
        if not jobs or not jobs <= self._shares.keys():
            return None
        return sum(max(0, self._shares[job_id] - self._received(job_id)) for job_id in jobs)

    def _forget_others(self) -> None:
        wanted = {*self._streams.values(), self._closed_job}
        for known in (self._outlooks, self._shares, self._traits):
            for job_id in known.keys() - wanted:
                del known[job_id]
