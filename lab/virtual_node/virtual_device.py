"""One stage's GPUs, which only take time: lanes of work, events between them, and copies over the node's links.

It implements the seam of the CUDA transfers (``pipemax.transfer.cuda.device``), so the real code that orders copies
drives it. Work on a lane runs in the order of its submission; when, is up to the events of the simulator's queue.

    a lane    | wait for an event | work | mark an event | work | …
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from lab.virtual_node.kv_order import Ints, Operation, StageKv, StepKv
from pipemax.domain.errors import TransferError
from pipemax.sim.event_queue import EventQueue, Priority
from pipemax.sim.links import Direction, Links
from pipemax.transfer.cuda.copy_runs import CopyRuns
from pipemax.transfer.cuda.device import Copy, DeviceEvent, Fence, KernelCall, Lane, Pool, Span

Resume = Callable[[], None]
Work = Callable[[Resume], None]
"""Begins when its turn has come, and calls its argument when it has ended, at once or later."""


class VirtualEvent:
    """A mark on a lane, or anything else that happens once."""

    __slots__ = ("_then", "done_s")

    def __init__(self) -> None:
        self.done_s: float | None = None
        self._then: list[Resume] = []

    def fire(self, now_s: float) -> None:
        """Note that it happens now, and resume who waited for it."""
        assert self.done_s is None, f"an event of {self.done_s} s happens again"
        self.done_s = now_s
        waiting, self._then = self._then, []
        for resume in waiting:
            resume()

    def then(self, resume: Resume) -> None:
        """Call ``resume`` when it happens; at once if it has."""
        if self.done_s is None:
            self._then.append(resume)
        else:
            resume()


def _own(event: DeviceEvent) -> VirtualEvent:
    assert isinstance(event, VirtualEvent), event
    return event


class _Lane:
    __slots__ = ("is_being_run", "is_busy", "todo")

    def __init__(self) -> None:
        self.todo: deque[Work] = deque()
        self.is_busy = False  # with work that has begun
        self.is_being_run = False  # by a call further up the stack


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenStoreKernel:
    """The kernel that stores single tokens on the host; implements ``KernelCall``."""

    stores: NDArray[np.int32]
    """Rows of (GPU block, host block, first slot, number of slots)."""
    num_bytes: int

    def launch(self, stream: int) -> None:
        raise AssertionError("a virtual device knows how long a kernel takes, not what it does")

    def reads(self) -> Sequence[Span]:
        return ()

    def writes(self) -> Sequence[Span]:
        return ()


class VirtualDevice:
    """Implements ``CopyDevice`` for the GPUs of one stage, which do everything together."""

    def __init__(
        self, queue: EventQueue, links: Links, *, gpus: range, block_bytes: int, kv: StageKv | None = None
    ) -> None:
        """Start idle. ``block_bytes``: of one GPU. ``kv`` checks all that is read and written."""
        self._kv = kv
        self._block_bytes = block_bytes
        self._queue = queue
        self._links = links
        self._gpus = gpus
        self._lanes = {lane: _Lane() for lane in Lane}

    # -- CopyDevice -----------------------------------------------------------------------------------------------

    def record(self, lane: Lane) -> VirtualEvent:
        event = VirtualEvent()
        self._enqueue(lane, partial(self._mark, event))
        return event

    def wait(self, lane: Lane, event: DeviceEvent, reason: Fence) -> None:
        self._enqueue(lane, _own(event).then)

    def is_done(self, event: DeviceEvent) -> bool:
        return _own(event).done_s is not None

    def elapsed_s(self, begin: DeviceEvent, end: DeviceEvent) -> float:
        begin_s, end_s = _own(begin).done_s, _own(end).done_s
        assert begin_s is not None, "elapsed time of an event that is not done"
        assert end_s is not None, "elapsed time of an event that is not done"
        return end_s - begin_s

    def copy(self, lane: Lane, copies: Iterable[Copy]) -> None:
        assert isinstance(copies, CopyRuns), copies
        if len(copies) == 0:
            return
        direction = Direction.HOST_TO_GPU if copies.source is Pool.HOST else Direction.GPU_TO_HOST
        check = None if self._kv is None else self._kv.copy(copies.source, *self._blocks(copies))
        self._transfer(lane, direction, int(copies.sizes.sum()), len(copies), check)

    def give_way(self, lane: Lane) -> None:
        """Do nothing: activations do not use these copy engines."""

    def launch(self, lane: Lane, call: KernelCall) -> None:
        assert isinstance(call, TokenStoreKernel), call
        check = None if self._kv is None else self._kv.store_tokens(call.stores)
        self._transfer(lane, Direction.GPU_TO_HOST, call.num_bytes, 1, check)

    def synchronize(self) -> None:
        """Let the node's time pass until both copy lanes are idle."""
        while any(self._lanes[lane].is_busy for lane in (Lane.PREFETCH, Lane.STORE)):
            if len(self._queue) == 0:
                raise TransferError("a copy lane waits for what never happens")
            self._queue.run_next()

    # -- what a stage's worker puts on the compute lane -----------------------------------------------------------

    def wait_for(self, event: VirtualEvent) -> None:
        """Have the computation wait for another stage."""
        self._enqueue(Lane.COMPUTE, event.then)

    def begin_step(self) -> None:
        """Note that a step's copies and its computation are submitted from here on."""
        if self._kv is not None:
            self._kv.begin_step()

    def compute(self, seconds: float, kv: StepKv | None, on_end: Callable[[], None] = lambda: None) -> None:
        """Compute for so long. ``WrongKvError`` if ``kv`` is not there; ``None`` checks nothing."""
        check = None if self._kv is None or kv is None else self._kv.compute(kv)

        def begin(resume: Resume) -> None:
            if check is not None:
                check.begin()
            self._queue.at(self._queue.now_s() + seconds, Priority.STAGE_DONE, partial(end, resume))

        def end(resume: Resume) -> None:
            if check is not None:
                check.end()
            on_end()
            resume()

        self._enqueue(Lane.COMPUTE, begin)

    # -- lanes ----------------------------------------------------------------------------------------------------

    def _blocks(self, copies: CopyRuns) -> tuple[Ints, Ints]:
        """Return the block ids of sources and targets."""
        nums = copies.sizes // self._block_bytes
        offsets = np.arange(nums.sum()) - np.repeat(np.cumsum(nums) - nums, nums)
        sources = np.repeat(copies.source_bytes // self._block_bytes, nums) + offsets
        targets = np.repeat(copies.target_bytes // self._block_bytes, nums) + offsets
        return sources, targets

    def _transfer(
        self, lane: Lane, direction: Direction, num_bytes: int, num_pieces: int, check: Operation | None
    ) -> None:
        """Copy so much on each of the GPUs; the lane goes on when the last has ended."""

        def begin(resume: Resume) -> None:
            if check is not None:
                check.begin()
            left = len(self._gpus)

            def ended() -> None:
                nonlocal left
                left -= 1
                if left == 0:
                    if check is not None:
                        check.end()
                    resume()

            for gpu in self._gpus:
                self._links.copy(gpu, direction, num_bytes=num_bytes, num_pieces=num_pieces, on_done=ended)

        self._enqueue(lane, begin)

    def _mark(self, event: VirtualEvent, resume: Resume) -> None:
        event.fire(self._queue.now_s())
        resume()

    def _enqueue(self, lane: Lane, work: Work) -> None:
        state = self._lanes[lane]
        state.todo.append(work)
        self._run(state)

    def _run(self, lane: _Lane) -> None:
        if lane.is_being_run:
            return  # a loop, since hundreds of marks in a row would be as many calls deep
        lane.is_being_run = True
        while lane.todo and not lane.is_busy:
            lane.is_busy = True
            lane.todo.popleft()(partial(self._resume, lane))
        lane.is_being_run = False

    def _resume(self, lane: _Lane) -> None:
        lane.is_busy = False
        self._run(lane)
