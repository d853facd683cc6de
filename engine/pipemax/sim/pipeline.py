"""Stages in a row: each runs one step at a time, in the order in which steps were submitted.

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
    number: int = field(init=False)
    """Assigned on submission: 0, 1, 2…"""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSpan:
    """One step on one stage, for reports: the half-open interval ``[start_s, end_s)``."""

    stage: int
    step_number: int
    kind: StepKind
    batch: int
    start_s: float
    end_s: float


class _Stage:
    __slots__ = ("last_arrival_s", "running", "waiting")

    def __init__(self) -> None:
        self.waiting: deque[Step] = deque()
        self.running = False
        self.last_arrival_s = 0.0


class Pipeline:
    """Runs steps through the stages.

    ``gate(stage, step)`` may hold a step back at a stage (its KV is still being copied); call ``poke`` when that may
    have changed. ``send(stage, bytes)`` returns how long handing activations to ``stage`` takes from now, in seconds.
    """

    def __init__(
        self,
        queue: EventQueue,
        num_stages: int,
        *,
        send: Callable[[int, float], float],
        gate: Callable[[int, Step], bool] | None = None,
        on_stage_start: Callable[[int, Step], None] | None = None,
        on_stage_end: Callable[[int, Step], None] | None = None,
        on_span: Callable[[StageSpan], None] | None = None,
    ) -> None:
        self._queue = queue
        self._stages = [_Stage() for _ in range(num_stages)]
        self._send = send
        self._gate = gate
        self._on_stage_start = on_stage_start
        self._on_stage_end = on_stage_end
        self._on_span = on_span
        self._num_submitted = 0

    def submit(self, step: Step) -> None:
        assert len(step.stage_s) == len(self._stages), (len(step.stage_s), len(self._stages))
        step.number = self._num_submitted
        self._num_submitted += 1
        self._arrive(0, step)

    def poke(self, stage: int) -> None:
        """Check again whether the step that waits at ``stage`` may start."""
        here = self._stages[stage]
        if here.running or not here.waiting:
            return
        step = here.waiting[0]
        if self._gate is not None and not self._gate(stage, step):
            return
        here.waiting.popleft()
        here.running = True
        start_s = self._queue.now_s()
        end_s = start_s + step.stage_s[stage]
        if self._on_stage_start is not None:
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
        self._queue.at(end_s, Priority.STAGE_DONE, lambda: self._end(stage, step))

    def _arrive(self, stage: int, step: Step) -> None:
        self._stages[stage].waiting.append(step)
        self.poke(stage)

    def _end(self, stage: int, step: Step) -> None:
        self._stages[stage].running = False
        if self._on_stage_end is not None:
            self._on_stage_end(stage, step)
        if stage + 1 == len(self._stages):
            step.on_done(step)
        else:
            behind = self._stages[stage + 1]
            delay_s = self._send(stage + 1, step.activation_bytes)
            # One channel between two stages: nothing sent later arrives earlier.
            behind.last_arrival_s = max(behind.last_arrival_s, self._queue.now_s() + delay_s)
            self._queue.at(behind.last_arrival_s, Priority.ARRIVAL, lambda: self._arrive(stage + 1, step))
        self.poke(stage)
