"""A device on which everything takes time, and a host that runs ahead of it: a discrete-event evaluation of the calls.

    host      | submit 0 | submit 1 | …        its clock moves by what submitting costs, and by waiting
    a lane    | wait for an event | work | work | …        in the order of submission; lanes run in parallel

A copy takes its bytes over the bandwidth of its direction. On the way out a stage's stores and its sends share it
evenly. The way in is one copy engine: of the calls that may run, it takes that which was submitted first, to its end.
So a call of prefetches goes before an activation that came while the one before was copied, as on an H100
(``docs/results/gpu.md``); only where no prefetch may run is it the activation's turn.
Nothing here says what may run at the same time without harm: that is for ``recording_device``.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from pipemax.transfer.cuda.device import Copy, Fence, KernelCall, Lane, Pool, Span


class Way(Enum):
    """What a piece of work needs while it runs; its amount is in bytes, for kernels in seconds."""

    IN = auto()
    OUT = auto()
    KERNEL = auto()
    """Also what only takes time."""


class Stream(Enum):
    """A stream that is none of the stage's lanes."""

    SEND = auto()
    RECEIVE = auto()
    """What the stage before computes and then has copied to this GPU; another process submits it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Of a device and of the host that submits to it."""

    bytes_per_s: float = 50e9
    """In each direction."""
    call_s: float = 1e-5
    """Of the host, for each call that submits work."""
    copy_s: float = 0.5e-6
    """Of the host, for each copy within a call."""
    give_way_s: float = 1e-5
    """From the end of a lane's copy until the next may begin, where the lane gives way. Not measured on a GPU."""


@dataclass(eq=False)
class TimedEvent:
    done_s: float | None = None


@dataclass(eq=False, kw_only=True)
class Work:
    """One piece of work, and when it ran."""

    way: Way
    left: float
    submitted_s: float
    order: int | None
    """Of submission, over all lanes; of work that another process submits, None until it may run."""
    blocks: tuple[int, ...] = ()
    """First bytes of a copy's sources."""
    begin_s: float | None = None
    end_s: float | None = None


@dataclass(frozen=True)
class TimedKernel:
    """Computes for so long, or writes so many bytes to the host."""

    seconds: float = 0.0
    out_bytes: int = 0

    def launch(self, stream: int) -> None:
        raise AssertionError("this device knows how long a kernel takes, not what it does")

    def reads(self) -> Sequence[Span]:
        return ()

    def writes(self) -> Sequence[Span]:
        return ()


@dataclass(frozen=True)
class _Mark:
    event: TimedEvent


@dataclass(frozen=True)
class _Wait:
    event: TimedEvent


@dataclass
class TimedDevice:
    """Implements ``CopyDevice``. ``dropped``: a fence that it leaves out."""

    costs: Costs = field(default_factory=Costs)
    dropped: Fence | None = None
    now_s: float = 0.0
    """The host's clock."""

    def __post_init__(self) -> None:
        self.ran: dict[Lane | Stream, list[Work]] = {stream: [] for stream in (*Lane, *Stream)}
        """All work, in the order of submission."""
        self._todo: dict[Lane | Stream, deque[Work | _Mark | _Wait]] = {s: deque() for s in self.ran}
        self._device_s = 0.0
        self._num_submitted = 0

    # -- CopyDevice -----------------------------------------------------------------------------------------------

    def record(self, lane: Lane) -> TimedEvent:
        event = TimedEvent()
        self._enqueue(lane, _Mark(event))
        return event

    def wait(self, lane: Lane, event: TimedEvent, reason: object) -> None:
        if reason is not self.dropped:
            self._enqueue(lane, _Wait(event))

    def is_done(self, event: TimedEvent) -> bool:
        return event.done_s is not None

    def elapsed_s(self, begin: TimedEvent, end: TimedEvent) -> float:
        assert begin.done_s is not None, "elapsed time of an event that is not done"
        assert end.done_s is not None, "elapsed time of an event that is not done"
        return end.done_s - begin.done_s

    def copy(self, lane: Lane, copies: Iterable[Copy]) -> None:
        listed = list(copies)
        way = Way.IN if listed[0].source.pool is Pool.HOST else Way.OUT
        num_bytes = sum(copy.source.num_bytes for copy in listed)
        self.host_works(self.costs.call_s + len(listed) * self.costs.copy_s)
        self._submit(lane, way, num_bytes, tuple(copy.source.first_byte for copy in listed))

    def give_way(self, lane: Lane) -> None:
        self._enqueue(lane, self._work(Way.KERNEL, self.costs.give_way_s))

    def launch(self, lane: Lane, call: KernelCall) -> None:
        assert isinstance(call, TimedKernel), call
        self.host_works(self.costs.call_s)
        if call.out_bytes:
            self._submit(lane, Way.OUT, call.out_bytes)
        else:
            self._submit(lane, Way.KERNEL, call.seconds)

    def synchronize(self) -> None:
        for lane in (Lane.PREFETCH, Lane.STORE):
            self.host_waits_for(self.record(lane))

    # -- the host, and other streams ------------------------------------------------------------------------------

    def host_works(self, seconds: float) -> None:
        """The host is busy, and the device goes on."""
        self.now_s += seconds
        self._run(until_s=self.now_s)

    def host_waits_for(self, event: TimedEvent) -> None:
        while event.done_s is None:
            assert self._run_to_next_end(until_s=float("inf")), "the host waits for what never happens"
        self.now_s = max(self.now_s, event.done_s)
        self._run(until_s=self.now_s)

    def send(self, num_bytes: int, after: TimedEvent) -> TimedEvent:
        """A stage's activations leave the GPU on a stream of their own."""
        event = TimedEvent()
        self._enqueue(Stream.SEND, _Wait(after))
        self._submit(Stream.SEND, Way.OUT, num_bytes)
        self._enqueue(Stream.SEND, _Mark(event))
        return event

    def receive(self, num_bytes: int, after_s: float) -> TimedEvent:
        """Activations enter the GPU by the copy engine once the stage before has computed for ``after_s``."""
        event = TimedEvent()
        self._enqueue(Stream.RECEIVE, self._work(Way.KERNEL, after_s))
        activation = Work(way=Way.IN, left=num_bytes, submitted_s=self.now_s, order=None)
        self.ran[Stream.RECEIVE].append(activation)
        self._enqueue(Stream.RECEIVE, activation)
        self._enqueue(Stream.RECEIVE, _Mark(event))
        return event

    # -- the evaluation -------------------------------------------------------------------------------------------

    def _submit(self, stream: Lane | Stream, way: Way, amount: float, blocks: tuple[int, ...] = ()) -> None:
        work = self._work(way, amount, blocks)
        self.ran[stream].append(work)
        self._enqueue(stream, work)

    def _work(self, way: Way, amount: float, blocks: tuple[int, ...] = ()) -> Work:
        return Work(way=way, left=amount, submitted_s=self.now_s, order=self._next_order(), blocks=blocks)

    def _next_order(self) -> int:
        self._num_submitted += 1
        return self._num_submitted

    def _enqueue(self, stream: Lane | Stream, item: Work | _Mark | _Wait) -> None:
        self._todo[stream].append(item)
        self._begin_what_may_run()

    def _run(self, until_s: float) -> None:
        while self._run_to_next_end(until_s):
            pass

    def _run_to_next_end(self, until_s: float) -> bool:
        """Go on to the next end of a piece of work; False, and on to ``until_s``, if that comes first or never."""
        running = self._running()
        rates = [self._rate(work.way, running) for work in running]
        ends = [self._device_s + work.left / rate for work, rate in zip(running, rates, strict=True)]
        next_s = min(ends, default=float("inf"))
        now_s = min(next_s, until_s)
        if now_s == float("inf"):
            return False
        for work, rate, end_s in zip(running, rates, ends, strict=True):
            work.left = 0.0 if end_s <= now_s else work.left - (now_s - self._device_s) * rate
        self._device_s = now_s
        self._begin_what_may_run()
        return next_s <= until_s

    def _running(self) -> list[Work]:
        heads = [todo[0] for todo in self._todo.values() if todo and isinstance(todo[0], Work)]
        running = [work for work in heads if work.way is not Way.IN]
        if incoming := [work for work in heads if work.way is Way.IN]:
            for work in incoming:
                if work.order is None:
                    work.order, work.submitted_s = self._next_order(), self._device_s
            running.append(min(incoming, key=lambda work: (work.begin_s is None, work.order)))
        return running

    def _rate(self, way: Way, running: list[Work]) -> float:
        if way is Way.KERNEL:
            return 1.0
        return self.costs.bytes_per_s / sum(work.way is way for work in running)

    def _begin_what_may_run(self) -> None:
        """End what is over; pass marks and waits until nothing more happens at this moment."""
        is_changed = True
        while is_changed:
            is_changed = any(self._pass_head(todo) for todo in self._todo.values())
        for work in self._running():
            work.begin_s = self._device_s if work.begin_s is None else work.begin_s

    def _pass_head(self, todo: deque[Work | _Mark | _Wait]) -> bool:
        match todo[0] if todo else None:
            case Work(left=left) if left > 0:
                return False
            case Work() as work:
                work.end_s = self._device_s
            case _Mark(event):
                event.done_s = self._device_s
            case _Wait(event) if event.done_s is not None:
                pass
            case _:
                return False
        todo.popleft()
        return True
