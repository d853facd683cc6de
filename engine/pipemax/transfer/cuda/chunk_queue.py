"""Keep copies waiting outside of the device, so that more urgent ones can overtake them.

    put → waiting, by priority → submitted: at most `in_flight_bytes` per direction → done

Activations go before KV (PipeMax, §3.4.2, "Demand-Priority Transfer Orchestration"). Not in the paper: prefetches
needed soonest go before later ones, and prefetches before offloads. An engine puts no activations here: vLLM sends
them, and nothing is submitted while a stage sends. ``flush`` ends all waiting: what comes next needs everything, in
its turn on the lanes.

The queue orders only what may be ordered freely. ``transfers`` fences on the lanes what must be in order, and never
leaves chunks of two steps here together.
"""

import heapq
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from pipemax.domain.units import GIB, MIB
from pipemax.transfer.commands import CopyCounts
from pipemax.transfer.cuda.copy_chunks import Chunk, CopyRuns
from pipemax.transfer.cuda.device import CopyDevice, DeviceEvent, Hold, Lane


class Priority(IntEnum):
    """Order of submission: the smallest goes first."""

    ACTIVATION = 0
    PREFETCH = 1
    OFFLOAD = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyLimits:
    """Limits on what is handed to the device at a time. ``ValueError`` for values below 1 byte."""

    chunk_bytes: int = 32 * MIB
    """Size of one submission: whatever comes behind it waits for it, 0.6 ms on PCIe 5."""
    in_flight_bytes: int = 64 * MIB
    """Maximum submitted and not done, in each direction. A single chunk of any size passes."""

    def __post_init__(self) -> None:
        for name in ("chunk_bytes", "in_flight_bytes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is at least 1, not {getattr(self, name)}")


class Ticket:
    """Chunks that were put in together. ``begin`` and ``end`` mark them on their lane as soon as they are there."""

    def __init__(self, num_chunks: int) -> None:
        self.num_waiting = num_chunks
        self.begin: DeviceEvent | None = None
        self.end: DeviceEvent | None = None


@dataclass(slots=True)
class CopyCounters:
    """Counts since the start."""

    bytes_by_lane: dict[Lane, int] = field(default_factory=lambda: dict.fromkeys(Lane, 0))
    """Bytes submitted."""
    queue_s: dict[Priority, float] = field(default_factory=lambda: dict.fromkeys(Priority, 0.0))
    """Sum of the chunks' waiting times between ``put`` and submission."""
    num_chunks: int = 0
    num_flushed: int = 0
    """Chunks that a flush submitted: the copies of that step took longer than the step."""
    num_held: int = 0
    """Chunks that a send held back."""
    peak_in_flight_bytes: int = 0
    """Peak in one direction, flushes included."""

    def __str__(self) -> str:
        waited = ", ".join(f"{priority.name.lower()} {s:.2f} s" for priority, s in self.queue_s.items() if s)
        prefetched, stored = (self.bytes_by_lane[lane] / GIB for lane in (Lane.PREFETCH, Lane.STORE))
        return (
            f"{prefetched:.2f} GiB prefetched, {stored:.2f} GiB stored in {self.num_chunks} chunks, "
            f"{self.num_flushed} of them at a step's beginning, {self.num_held} held back by sends; at most "
            f"{self.peak_in_flight_bytes / MIB:.1f} MiB in flight; waited in the queue: {waited or 'none'}"
        )

    def to_counts(self) -> CopyCounts:
        return CopyCounts(
            loaded_bytes=self.bytes_by_lane[Lane.PREFETCH],
            stored_bytes=self.bytes_by_lane[Lane.STORE],
            load_queue_s=self.queue_s[Priority.PREFETCH],
            store_queue_s=self.queue_s[Priority.OFFLOAD],
            num_chunks=self.num_chunks,
            num_late_chunks=self.num_flushed,
            num_held_chunks=self.num_held,
        )


@dataclass(slots=True, order=True)
class _Entry:
    priority: Priority
    needed_by: int
    sequence: int
    chunk: Chunk = field(compare=False)
    ticket: Ticket = field(compare=False)
    after: DeviceEvent | None = field(compare=False)
    put_s: float = field(compare=False)
    is_held: bool = field(default=False, compare=False)


class ChunkQueue:
    """The waiting chunks of both directions. Thread-safe. Only ``pump`` and ``flush`` submit."""

    def __init__(
        self, device: CopyDevice, limits: CopyLimits, clock_s: Callable[[], float] = time.perf_counter
    ) -> None:
        self._device = device
        self.limits = limits
        self._clock_s = clock_s
        self._lock = threading.Lock()
        self._sequence = itertools.count()
        self._waiting: dict[Lane, list[_Entry]] = {Lane.PREFETCH: [], Lane.STORE: []}
        self._in_flight: dict[Lane, deque[tuple[DeviceEvent, int]]] = {
            Lane.PREFETCH: deque(),
            Lane.STORE: deque(),
        }
        self._in_flight_bytes = {Lane.PREFETCH: 0, Lane.STORE: 0}
        self._send: tuple[DeviceEvent, DeviceEvent] | None = None
        self.counters = CopyCounters()

    @property
    def num_waiting(self) -> int:
        """The number of chunks not submitted yet."""
        return sum(len(entries) for entries in self._waiting.values())

    def put(
        self,
        chunks: Sequence[Chunk],
        *,
        priority: Priority,
        needed_by: int = 0,
        after: DeviceEvent | None = None,
    ) -> Ticket:
        """Queue chunks of one lane, to be submitted in this order unless something more urgent comes.

        ``needed_by``: the step that waits for them; the smallest goes first within a priority. ``after``: they cannot
        run before this event, so until then they stay here and take up no room in flight.
        """
        assert chunks, "nothing to put"
        ticket = Ticket(len(chunks))
        now_s = self._clock_s()
        with self._lock:
            for chunk in chunks:
                entry = _Entry(priority, needed_by, next(self._sequence), chunk, ticket, after, now_s)
                heapq.heappush(self._waiting[chunk.lane], entry)
        return ticket

    def hold_for_send(self, begin: DeviceEvent, end: DeviceEvent) -> None:
        """Submit nothing but activations between these two events, by the device's progress."""
        with self._lock:
            self._send = (begin, end)

    def pump(self) -> int:
        """Submit what may be submitted now. Return the number of chunks."""
        with self._lock:
            if self._is_sending():
                self._count_held()
            return sum(self._pump_lane(lane) for lane in self._waiting)

    def flush(self) -> None:
        """Submit all that waits, whatever is in flight. During a send, the lane queues it behind the send."""
        with self._lock:
            for lane, entries in self._waiting.items():
                if entries and self._send is not None and not self._device.is_done(self._send[1]):
                    self._device.wait(lane, self._send[1], Hold.AFTER_SEND)
                while entries:
                    self._submit(lane)
                    self.counters.num_flushed += 1

    def _pump_lane(self, lane: Lane) -> int:
        self._retire(lane)
        num_submitted = 0
        while self._waiting[lane] and self._has_room(lane, self._waiting[lane][0]):
            self._submit(lane)
            num_submitted += 1
        return num_submitted

    def _retire(self, lane: Lane) -> None:
        in_flight = self._in_flight[lane]
        while in_flight and self._device.is_done(in_flight[0][0]):
            self._in_flight_bytes[lane] -= in_flight.popleft()[1]

    def _has_room(self, lane: Lane, entry: _Entry) -> bool:
        if entry.priority is not Priority.ACTIVATION and self._is_sending():
            return False
        if entry.after is not None and not self._device.is_done(entry.after):
            return False
        if not self._in_flight[lane]:
            return True
        return self._in_flight_bytes[lane] + entry.chunk.num_bytes <= self.limits.in_flight_bytes

    def _is_sending(self) -> bool:
        if self._send is None or not self._device.is_done(self._send[0]):
            return False
        if self._device.is_done(self._send[1]):
            self._send = None
            return False
        return True

    def _submit(self, lane: Lane) -> None:
        entry = self._waiting[lane][0]
        ticket, chunk = entry.ticket, entry.chunk
        if ticket.begin is None:
            ticket.begin = self._device.record(lane)
        if isinstance(chunk.work, CopyRuns):
            self._device.copy(lane, chunk.work)
        else:
            self._device.launch(lane, chunk.work)
        end = self._device.record(lane)
        heapq.heappop(self._waiting[lane])  # a chunk that the device refuses stays, and fails again in flush
        ticket.num_waiting -= 1
        if ticket.num_waiting == 0:
            ticket.end = end
        self._in_flight[lane].append((end, chunk.num_bytes))
        self._in_flight_bytes[lane] += chunk.num_bytes
        self._count(entry)

    def _count_held(self) -> None:
        for entry in itertools.chain.from_iterable(self._waiting.values()):
            if entry.priority is not Priority.ACTIVATION and not entry.is_held:
                entry.is_held = True
                self.counters.num_held += 1

    def _count(self, entry: _Entry) -> None:
        counters, lane = self.counters, entry.chunk.lane
        counters.bytes_by_lane[lane] += entry.chunk.num_bytes
        counters.queue_s[entry.priority] += self._clock_s() - entry.put_s
        counters.num_chunks += 1
        counters.peak_in_flight_bytes = max(counters.peak_in_flight_bytes, self._in_flight_bytes[lane])
