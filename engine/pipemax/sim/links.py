"""Copies between host and GPUs: one FIFO copy engine per GPU and direction, under shared caps.

A copy of many pieces is slower than its link, because every piece adds a fixed cost. Running copies share, max-min
fairly, the bandwidth of both directions of a link, of the root complex and of the host's DRAM, so rates change whenever
a copy starts or ends. Activations between stages do not pass through the copy engines, but cross the same links.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum

from pipemax.domain.specs import NodeSpec
from pipemax.sim.event_queue import EventQueue, Priority


class Direction(IntEnum):
    """The direction of a copy; each GPU has one copy engine for each."""

    HOST_TO_GPU = 0
    GPU_TO_HOST = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class CopySpan:
    """One copy's time span, for reports."""

    gpu: int
    direction: Direction
    num_bytes: float
    start_s: float
    end_s: float


class _Copy:
    __slots__ = ("left_s", "num_bytes", "on_done", "peak_bytes_per_s", "rate", "start_s")

    def __init__(self, num_bytes: float, peak_bytes_per_s: float, on_done: Callable[[], None]) -> None:
        self.num_bytes = num_bytes
        self.peak_bytes_per_s = peak_bytes_per_s
        self.left_s = num_bytes / peak_bytes_per_s  # at the peak rate; a rate of 0.5 takes twice as long
        self.rate = 1.0
        self.on_done = on_done
        self.start_s = 0.0


class _Engine:
    """One copy engine: the copy at the head of its queue runs, the others wait."""

    __slots__ = ("busy_s", "caps", "copied_bytes", "deadline", "direction", "gpu", "head", "waiting")

    def __init__(self, gpu: int, direction: Direction, caps: tuple[int, ...]) -> None:
        self.gpu = gpu
        self.direction = direction
        self.caps = caps
        self.head: _Copy | None = None
        self.waiting: deque[_Copy] = deque()
        self.deadline = 0  # number of the event that ends the head; earlier events are void
        self.busy_s = 0.0
        self.copied_bytes = 0.0


def fair_rates(
    peaks: Sequence[float], caps_of: Sequence[tuple[int, ...]], caps: Sequence[float]
) -> list[float]:
    """Return max-min fair rates in bytes/s: all grow together until a cap is met, which freezes those under it."""
    rates = list(peaks)
    open_flows = list(range(len(peaks)))
    left = list(caps)
    members = [0] * len(caps)
    for flow in open_flows:
        for cap in caps_of[flow]:
            members[cap] += 1
    while open_flows:
        share = [room / count if count else 0.0 for room, count in zip(left, members, strict=True)]
        bounds = [min(peaks[flow], *[share[cap] for cap in caps_of[flow]]) for flow in open_flows]
        least = min(bounds)
        still_open = []
        for flow, bound in zip(open_flows, bounds, strict=True):
            if bound > least:
                still_open.append(flow)
                continue
            rates[flow] = least
            for cap in caps_of[flow]:
                members[cap] -= 1
                left[cap] = max(0.0, left[cap] - least)
        open_flows = still_open
    return rates


class Links:
    """All copy engines of a node."""

    def __init__(
        self, queue: EventQueue, node: NodeSpec, *, on_span: Callable[[CopySpan], None] | None = None
    ) -> None:
        self._queue = queue
        self._link = node.link
        self._on_span = on_span
        num_roots = -(-node.num_gpus // node.gpus_per_root)
        # caps: [links, both directions | roots, host → GPU | roots, GPU → host | host DRAM]
        self._caps = [node.link.duplex_bytes_per_s] * node.num_gpus
        self._caps += [node.root_bytes_per_s] * (2 * num_roots)
        self._caps += [node.host_dram_bytes_per_s]
        # The demands are sums of floats: a rounding error above the cap is not above it.
        self._bounds = [cap * (1 + 1e-9) for cap in self._caps]
        self._demand = [0.0] * len(self._caps)
        self._exceeded: set[int] = set()  # the caps whose demand is above them
        self._last_s = 0.0
        self._throttled = False
        self._engines = {}
        for gpu in range(node.num_gpus):
            for direction in Direction:
                root = node.num_gpus + num_roots * direction + gpu // node.gpus_per_root
                caps = (gpu, root, len(self._caps) - 1)
                self._engines[gpu, direction] = _Engine(gpu, direction, caps)
        self._active: list[_Engine] = []

    def copy(
        self,
        gpu: int,
        direction: Direction,
        *,
        num_bytes: float,
        num_pieces: float,
        on_done: Callable[[], None],
    ) -> None:
        """Queue a copy; ``on_done`` is called when its last byte has arrived."""
        assert num_bytes > 0, num_bytes
        assert num_pieces > 0, num_pieces
        match direction:
            case Direction.HOST_TO_GPU:
                link_bytes_per_s = self._link.host_to_gpu_bytes_per_s
            case Direction.GPU_TO_HOST:
                link_bytes_per_s = self._link.gpu_to_host_bytes_per_s
        alone_s = num_pieces * self._link.per_copy_s + num_bytes / link_bytes_per_s
        engine = self._engines[gpu, direction]
        engine.waiting.append(_Copy(num_bytes, num_bytes / alone_s, on_done))
        if engine.head is None:
            self._start(engine)

    def queued_s(self, gpu: int, direction: Direction) -> float:
        """Return the seconds that the copies queued on an engine still need at their present rates.

        An activation without priority waits this long.
        """
        engine = self._engines[gpu, direction]
        if engine.head is None:
            return 0.0
        elapsed_s = self._queue.now_s() - self._last_s
        head_s = max(0.0, engine.head.left_s / engine.head.rate - elapsed_s)
        return head_s + sum(copy.left_s for copy in engine.waiting)

    def busy_s(self, direction: Direction) -> float:
        """Return the seconds in which copy engines of this direction were busy, summed over the GPUs."""
        return sum(e.busy_s for e in self._engines.values() if e.direction is direction)

    def copied_bytes(self, direction: Direction) -> float:
        return sum(e.copied_bytes for e in self._engines.values() if e.direction is direction)

    def _start(self, engine: _Engine) -> None:
        self._settle()
        copy = engine.waiting.popleft()
        copy.start_s = self._queue.now_s()
        engine.head = copy
        self._active.append(engine)
        self._add_demand(engine, copy.peak_bytes_per_s)
        self._rerate(engine)

    def _finish(self, engine: _Engine, deadline: int) -> None:
        if deadline != engine.deadline:
            return  # its rate has changed since: another event ends it
        self._settle()
        copy = engine.head
        assert copy is not None
        now_s = self._queue.now_s()
        engine.head = None
        engine.busy_s += now_s - copy.start_s
        engine.copied_bytes += copy.num_bytes
        self._active.remove(engine)
        self._add_demand(engine, -copy.peak_bytes_per_s)
        if self._on_span is not None:
            self._on_span(
                CopySpan(
                    gpu=engine.gpu,
                    direction=engine.direction,
                    num_bytes=copy.num_bytes,
                    start_s=copy.start_s,
                    end_s=now_s,
                )
            )
        if engine.waiting:
            self._start(engine)
        else:
            self._rerate(None)
        copy.on_done()

    def _add_demand(self, engine: _Engine, bytes_per_s: float) -> None:
        for cap in engine.caps:
            self._demand[cap] += bytes_per_s
            if self._demand[cap] > self._bounds[cap]:
                self._exceeded.add(cap)
            else:
                self._exceeded.discard(cap)

    def _settle(self) -> None:
        """Subtract what was copied since the rates last changed."""
        now_s = self._queue.now_s()
        elapsed_s = now_s - self._last_s
        self._last_s = now_s
        if elapsed_s > 0:
            for engine in self._active:
                assert engine.head is not None
                engine.head.left_s = max(0.0, engine.head.left_s - elapsed_s * engine.head.rate)

    def _rerate(self, started: _Engine | None) -> None:
        """Set the rates again, and schedule the ends that change with them."""
        over = bool(self._exceeded)
        changed = [] if started is None else [started]
        if over or self._throttled:
            heads = [engine.head for engine in self._active if engine.head is not None]
            peaks = [head.peak_bytes_per_s for head in heads]
            rates = fair_rates(peaks, [e.caps for e in self._active], self._caps) if over else peaks
            for engine, head, rate in zip(self._active, heads, rates, strict=True):
                relative = rate / head.peak_bytes_per_s
                if relative != head.rate or engine is started:
                    head.rate = relative
                    if engine is not started:
                        changed.append(engine)
        self._throttled = over
        for engine in changed:
            assert engine.head is not None
            engine.deadline += 1
            end_s = self._queue.now_s() + engine.head.left_s / engine.head.rate
            self._queue.at(end_s, Priority.COPY_DONE, _Ending(self, engine, engine.deadline))


class _Ending:
    """The event that ends an engine's head, unless its rate changes first."""

    __slots__ = ("_deadline", "_engine", "_links")

    def __init__(self, links: Links, engine: _Engine, deadline: int) -> None:
        self._links = links
        self._engine = engine
        self._deadline = deadline

    def __call__(self) -> None:
        self._links._finish(self._engine, self._deadline)
