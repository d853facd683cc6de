"""Collect a stage's step and copy times from one report to the next.

On a CPU the worker measures its own seconds. On a GPU it enqueues work and goes on, so there a step's time is the
time between two events on the compute lane, and is reported once the device has passed them: later by the depth of
the queue.
"""

import time
from collections import deque
from dataclasses import dataclass

from pipemax.domain.plan import StepId
from pipemax.transfer.commands import StepWait
from pipemax.transfer.cuda.device import CopyDevice, DeviceEvent, Lane
from pipemax.vllm_ext.worker.stage_reports import PrefetchReport, StageReport, StepReport


class StageClock:
    """Times steps by what the worker says that they took (``add_compute_s``)."""

    def __init__(self) -> None:
        self.begin_s = 0.0
        self._step_id: StepId | None = None
        self._compute_s = 0.0
        self._steps: list[StepReport] = []
        self._prefetches: list[PrefetchReport] = []
        self._stall_s = 0.0

    def begin(self, step_id: StepId, wait: StepWait) -> None:
        """Begin a step, which has its copies and can compute.

        ``wait`` may have the times of any steps' prefetches, on a fast link this one's among them.
        """
        self._end_step()
        for timing in wait.prefetches:
            if timing.step_id is not None:
                self._prefetches.append(
                    PrefetchReport(
                        step_id=timing.step_id, num_blocks=timing.num_blocks, seconds=timing.seconds
                    )
                )
        self._stall_s += wait.stall_s
        self._step_id, self._compute_s = step_id, 0.0
        self.begin_s = time.perf_counter()

    def add_compute_s(self, seconds: float) -> None:
        self._compute_s += seconds

    def take_report(self) -> StageReport | None:
        if not (self._steps or self._prefetches or self._stall_s):
            return None
        report = StageReport(
            steps=tuple(self._steps), prefetches=tuple(self._prefetches), stall_s=self._stall_s
        )
        self._steps, self._prefetches, self._stall_s = [], [], 0.0
        return report

    def _end_step(self) -> None:
        if self._step_id is not None and self._compute_s > 0:
            self._steps.append(StepReport(step_id=self._step_id, compute_s=self._compute_s))


@dataclass(slots=True)
class _TimedStep:
    step_id: StepId
    begin: DeviceEvent
    end: DeviceEvent | None = None
    """None until the step is known to compute anything."""


class GpuStageClock(StageClock):
    """Times steps by marks on the compute lane of ``device``."""

    def __init__(self, device: CopyDevice) -> None:
        super().__init__()
        self._device = device
        self._current: _TimedStep | None = None
        self._computing: deque[_TimedStep] = deque()

    def begin(self, step_id: StepId, wait: StepWait) -> None:
        super().begin(step_id, wait)
        self._current = _TimedStep(step_id, self._device.record(Lane.COMPUTE))

    def mark_received(self) -> None:
        """Note that the lane has waited for the stage before: if the step has begun, it computes from here on."""
        if self._current is not None and self._current.end is None:
            self._current.begin = self._device.record(Lane.COMPUTE)

    def mark_computed(self) -> None:
        """Mark the end of the step's computation on the lane."""
        assert self._current is not None, "a step that has not begun was computed"
        self._current.end = self._device.record(Lane.COMPUTE)

    def mark_sampled(self) -> None:
        """Move that mark behind what chooses the step's tokens, if the step computed any."""
        if self._current is not None and self._current.end is not None:
            self._current.end = self._device.record(Lane.COMPUTE)

    def take_report(self) -> StageReport | None:
        while self._computing:
            step = self._computing[0]
            assert step.end is not None, step
            if not self._device.is_done(step.end):
                break
            seconds = self._device.elapsed_s(step.begin, step.end)
            self._steps.append(StepReport(step_id=step.step_id, compute_s=seconds))
            self._computing.popleft()
        return super().take_report()

    def _end_step(self) -> None:
        if self._current is not None and self._current.end is not None:
            self._computing.append(self._current)
