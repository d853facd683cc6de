"""Flow control: how many rows and bytes each stream may send.

A row belongs to one of three counts of its stream: *unused* credit (granted, not yet sent), *running* (sent, not
yet finished) and *undelivered* (finished, not yet taken by the client). A row that waits for the outcome of an equal
one counts as undelivered from the start. Unused and running rows of all streams fill one window. Two rules keep
chained calls, where one stream's output is another's input, from deadlock:

- a stream whose unused and running rows are fewer than a chunk is given the rest of the chunk, even when the
  others fill the window: so the window overflows by at most a chunk per stream;
- undelivered rows leave the window and count against a bound of their own stream: so a stream whose consumer waits
  holds up no other stream.

Beyond its chunk a stream gets nothing while an older one asks for more. So partitions end one after the other and
not all at once: while one waits for its last rows, another still has rows to send. If streams of equal partitions were
served evenly, all would run dry at the same moment, and no rows could come before one of them had closed.

This module knows nothing of Flight, of Arrow or of the engine.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from pipemax.serve.limits import WindowLimits

_MAX_CHUNKS_AT_ONCE = 16
"""Maximum unused credit of one stream, in chunks: a stream that does not send must not hold the window."""
_ASKING_S = 0.5
"""A refused stream asks again within this time. One that does not (its client does not read) holds up no other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """Credit to pass to a client."""

    rows: int
    bytes: int


@dataclass(slots=True)
class _Count:
    """One stream's rows, or its bytes.

    A row larger than the credit takes unused bytes below zero: a debt that the next grants pay off.
    """

    unused: int = 0
    running: int = 0
    undelivered: int = 0

    def held(self) -> int:
        """Return how much of the window it takes; a debt does not free any room."""
        return max(0, self.unused) + self.running


class CreditWindow:
    """The window that all streams of a server share. Thread-safe."""

    def __init__(self, limits: WindowLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self.limits = limits
        self._clock = clock
        self._lock = threading.Lock()
        self._streams: dict[StreamCredit, None] = {}  # the oldest first
        self._window_rows = limits.max_rows
        self._held_rows = 0
        self._held_bytes = 0
        self._running_rows = 0

    def open_stream(self) -> "StreamCredit":
        stream = StreamCredit(self)
        with self._lock:
            self._streams[stream] = None
        return stream

    def resize(self, window_rows: int) -> bool:
        """Set the maximum of granted and running rows; what is granted stays. Return ``True`` if it has grown."""
        with self._lock:
            before, self._window_rows = self._window_rows, min(window_rows, self.limits.max_rows)
            return self._window_rows > before

    @property
    def rows(self) -> int:
        """The maximum of rows that may be granted or running."""
        return self._window_rows

    @property
    def running_rows(self) -> int:
        with self._lock:
            return self._running_rows

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` unless the window's sums are those of its streams."""
        with self._lock:
            assert self._held_rows == sum(s.rows.held() for s in self._streams)
            assert self._held_bytes == sum(s.bytes.held() for s in self._streams)
            assert self._running_rows == sum(s.rows.running for s in self._streams)
            assert all(s.rows.unused >= 0 and s.rows.running >= 0 for s in self._streams)
            assert all(s.rows.undelivered >= 0 and s.bytes.undelivered >= 0 for s in self._streams)

    # Under the lock.

    def _move(self, stream: "StreamCredit", rows: _Count, size: _Count) -> None:
        """Add these changes to a stream's counts and to the window's sums."""
        assert stream in self._streams, "the stream is closed"
        self._held_rows -= stream.rows.held()
        self._held_bytes -= stream.bytes.held()
        for count, change in ((stream.rows, rows), (stream.bytes, size)):
            count.unused += change.unused
            count.running += change.running
            count.undelivered += change.undelivered
        self._held_rows += stream.rows.held()
        self._held_bytes += stream.bytes.held()
        self._running_rows += rows.running

    def _offer(self, stream: "StreamCredit") -> Grant | None:
        if not self._takes(stream):
            return None
        limits, streams = self.limits, len(self._streams)
        room_rows = 0 if self._is_older_asking(stream) else self._window_rows - self._held_rows
        room_bytes = limits.max_bytes - self._held_bytes
        rows = _top_up(stream.rows, chunk=limits.chunk_rows, room=room_rows, streams=streams)
        size = _top_up(stream.bytes, chunk=limits.chunk_bytes, room=room_bytes, streams=streams)
        return Grant(rows=rows, bytes=size) if rows or size else None

    def _takes(self, stream: "StreamCredit") -> bool:
        """Tell whether the stream has more to send and its client takes what is done."""
        limits = self.limits
        return (
            not stream._has_ended
            and stream.rows.undelivered < limits.undelivered_rows
            and stream.bytes.undelivered < limits.undelivered_bytes
        )

    def _is_older_asking(self, stream: "StreamCredit") -> bool:
        since_s = self._clock() - _ASKING_S
        for other in self._streams:
            if other is stream:
                return False
            if other._asked_at_s is not None and other._asked_at_s >= since_s and other.is_low:
                return True
        raise AssertionError("the stream is closed")


class StreamCredit:
    """One stream's part of the window. Thread-safe."""

    def __init__(self, window: CreditWindow) -> None:
        self._window = window
        self.rows = _Count()
        self.bytes = _Count()
        self._asked_at_s: float | None = None  # None: it wants nothing more, or cannot take it
        self._has_ended = False

    def grant(self) -> Grant | None:
        """Return the credit to send to the client now, if any; it counts as granted from here on."""
        window = self._window
        with window._lock:
            offer = window._offer(self)
            self._asked_at_s = window._clock() if window._takes(self) and self.is_low else None
            if offer is not None:
                # Under the same lock: another stream must not be granted the same room.
                window._move(self, _Count(unused=offer.rows), _Count(unused=offer.bytes))
            return offer

    def would_grant(self) -> bool:
        """Tell whether ``grant`` would give credit now, without asking for any."""
        with self._window._lock:
            return self._window._offer(self) is not None

    def receive(self, *, rows: int, size: int) -> None:
        """Record that the client has sent this much."""
        assert rows <= self.rows.unused, f"{rows} rows sent on {self.rows.unused} rows of credit"
        self._move(_Count(unused=-rows, running=rows), _Count(unused=-size, running=size))

    def finish(self, *, rows: int, size: int, output_size: int) -> None:
        """Record that rows of ``size`` bytes are done, and wait to be delivered with ``output_size`` bytes."""
        self._move(_Count(running=-rows, undelivered=rows), _Count(running=-size, undelivered=output_size))

    def set_aside(self, *, rows: int, size: int) -> None:
        """Record that running rows of ``size`` bytes wait for the outcome of others.

        They leave the window, because they take no room in the engine, and count as undelivered.
        """
        self._move(_Count(running=-rows, undelivered=rows), _Count(running=-size))

    def finish_waiting(self, *, output_size: int) -> None:
        """Record that a row that was set aside is done, and waits to be delivered."""
        self._move(_Count(), _Count(undelivered=output_size))

    def deliver(self, *, rows: int, output_size: int) -> None:
        """Record that the client has taken finished rows."""
        self._move(_Count(undelivered=-rows), _Count(undelivered=-output_size))

    def end_input(self) -> None:
        """Free the unused credit for other streams: the client sends no more, though its rows still run."""
        window = self._window
        with window._lock:
            if self in window._streams:
                window._move(self, _Count(unused=-self.rows.unused), _Count(unused=-self.bytes.unused))
                self._asked_at_s, self._has_ended = None, True

    def close(self) -> None:
        """Give back everything. Safe to call twice."""
        window = self._window
        with window._lock:
            if self in window._streams:
                del window._streams[self]
                window._held_rows -= self.rows.held()
                window._held_bytes -= self.bytes.held()
                window._running_rows -= self.rows.running

    @property
    def is_low(self) -> bool:
        """Whether more would be granted if the window had room."""
        return self.rows.unused <= self._window.limits.chunk_rows // 2

    def _move(self, rows: _Count, size: _Count) -> None:
        with self._window._lock:
            self._window._move(self, rows, size)


def _top_up(count: _Count, *, chunk: int, room: int, streams: int) -> int:
    """Return how much to grant: nothing while over half a chunk is unused, and no less than a quarter of a chunk.

    The quarter keeps a full window, which frees one row at a time, from sending rows one at a time.
    """
    if count.unused > chunk // 2:
        return 0
    guaranteed = chunk - (count.unused + count.running)
    target = max(chunk, min(room // (2 * streams), _MAX_CHUNKS_AT_ONCE * chunk))
    affordable = min(target - count.unused, room)
    amount = max(guaranteed, affordable)
    return amount if amount >= max(1, chunk // 4) else 0
