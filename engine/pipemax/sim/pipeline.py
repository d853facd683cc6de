"""Stages in a row: each runs one step at a time, in the order in which steps were submitted.

A step may compute on each stage in several parts of equal length, one after another: groups of the stage's layers.
It knows durations, not what a step computes. Appendix A.1 of the paper describes a property of this pipeline.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from pipemax.sim.event_queue import EventQueue, Priority


class StepKind(StrEnum):
    """The kind of work that a step computes."""

    PREFILL = "prefill"
    DECODE = "decode"
    MIXED = "mixed"


@dataclass(slots=True, kw_only=True, eq=False)
class Step:
    """One batch's pass through all stages."""

    kind: StepKind
    stage_s: Sequence[float]
    """Seconds on each stage."""
    activation_bytes: float
    """Bytes handed from each stage to the next."""
    on_done: Callable[["Step"], None]
    """Called when the last stage ends."""
    batch: int
    """Decode requests."""
    tokens: int
    """Tokens computed, prompts and outputs alike."""
    num_parts: int = 1
    """Into how many parts it is divided on each stage."""
    number: int = field(init=False)
    """Assigned on submission: 0, 1, 2…"""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSpan:
    """One step on one stage, or a part of it, for reports: the half-open interval ``[start_s, end_s)``."""

    stage: int
    step_number: int
    kind: StepKind
    batch: int
    start_s: float
    end_s: float


class _Stage:
    __slots__ = ("held_since_s", "last_arrival_s", "part", "running", "waiting")

    def __init__(self) -> None:
        self.waiting: deque[Step] = deque()  # with the step that runs, or is between two of its parts, first
        self.part = 0  # of the first step, the part that runs or comes next
        self.running = False
        self.held_since_s: float | None = None
        self.last_arrival_s = 0.0


class Pipeline:
    """Runs steps through the stages.

    ``gate(stage, step, part)`` may hold a part of a step back at a stage (its KV is still being copied); call ``poke``
    when that may have changed. ``on_stall(seconds)`` is told how long a part was held, ``on_part_end(stage, step,
    part)`` of the end of each part. ``send(stage, bytes)`` returns how long handing activations to ``stage`` takes from
    now, in seconds.
    """

    def __init__(
        self,
        queue: EventQueue,
        num_stages: int,
        *,
        send: Callable[[int, float], float],
        gate: Callable[[int, Step, int], bool] | None = None,
        on_stage_start: Callable[[int, Step], None] | None = None,
        on_part_end: Callable[[int, Step, int], None] | None = None,
        on_stall: Callable[[float], None] | None = None,
        on_span: Callable[[StageSpan], None] | None = None,
    ) -> None:
        self._queue = queue
        self._stages = [_Stage() for _ in range(num_stages)]
        self._send = send
        self._gate = gate
        self._on_stage_start = on_stage_start
        self._on_part_end = on_part_end
        self._on_stall = on_stall
        self._on_span = on_span
        self._num_submitted = 0

    def submit(self, step: Step) -> None:
        assert len(step.stage_s) == len(self._stages), (len(step.stage_s), len(self._stages))
        step.number = self._num_submitted
        self._num_submitted += 1
        self._arrive(0, step)

    def poke(self, stage: int) -> None:
        """Check again whether what waits at ``stage`` may start."""
        here = self._stages[stage]
        if here.running or not here.waiting:
            return
        step, now_s = here.waiting[0], self._queue.now_s()
        if self._gate is not None and not self._gate(stage, step, here.part):
            if here.held_since_s is None:
                here.held_since_s = now_s
            return
        if here.held_since_s is not None:
            if self._on_stall is not None:
                self._on_stall(now_s - here.held_since_s)
            here.held_since_s = None
        self._start(stage, step, now_s)

    def _start(self, stage: int, step: Step, start_s: float) -> None:
        here = self._stages[stage]
        here.running = True
        end_s = start_s + step.stage_s[stage] / step.num_parts
        if here.part == 0 and self._on_stage_start is not None:
            self._on_stage_start(stage, step)
        if self._on_span is not None:
            self._on_span(
                StageSpan(
                    stage=stage,
                    step_number=step.number,
                    kind=step.kind,
                    batch=step.batch,
                    start_s=start_s,
                    end_s=end_s,
                )
            )
        self._queue.at(end_s, Priority.STAGE_DONE, lambda: self._end_part(stage, step))

    def _arrive(self, stage: int, step: Step) -> None:
        self._stages[stage].waiting.append(step)
        self.poke(stage)

    def _end_part(self, stage: int, step: Step) -> None:
        here = self._stages[stage]
        part, here.part = here.part, (here.part + 1) % step.num_parts
        here.running = False
        if here.part == 0:
            here.waiting.popleft()
        if self._on_part_end is not None:
            self._on_part_end(stage, step, part)
        if here.part == 0:
            self._pass_on(stage, step)
        self.poke(stage)

    def _pass_on(self, stage: int, step: Step) -> None:
        """Hand a step that a stage has computed to the next one; behind the last it is done."""
        if stage + 1 == len(self._stages):
            step.on_done(step)
            return
        behind = self._stages[stage + 1]
        delay_s = self._send(stage + 1, step.activation_bytes)
        # One channel between two stages: nothing sent later arrives earlier.
        behind.last_arrival_s = max(behind.last_arrival_s, self._queue.now_s() + delay_s)
        self._queue.at(behind.last_arrival_s, Priority.ARRIVAL, lambda: self._arrive(stage + 1, step))
