"""Sample what an engine's core does, on one GPU: ``worker_cls: lab.gpu.sampled.SampledWorker``.

An engine with one GPU has its worker in the core's process, whose main thread schedules and launches. ``SAMPLES`` names
the file for the stacks of the last seconds: one line for each, with how often it was seen. A timer's signal takes them
on the main thread itself, behind the call that it interrupts: another thread would see the main one only where that
lets go of Python's lock, which is in few places.
"""

import os
import signal
from collections import Counter, deque
from pathlib import Path
from types import FrameType
from typing import Any

from pipemax.vllm_ext.worker.gpu_worker import PipeMaxGpuWorker

PERIOD_S = 0.01
KEPT_S = 10.0
_WRITE_EVERY = 300
_MOST_FRAMES = 60


def stack_of(frame: FrameType | None) -> str:
    """Return a stack as ``file:function:line`` from the outermost on, separated by semicolons."""
    names: list[str] = []
    while frame is not None and len(names) < _MOST_FRAMES:
        names.append(f"{Path(frame.f_code.co_filename).stem}:{frame.f_code.co_name}:{frame.f_lineno}")
        frame = frame.f_back
    return ";".join(reversed(names))


class Samples:
    """Samples the stacks of the main thread while it uses the CPU, until the process ends."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._kept: deque[str] = deque(maxlen=round(KEPT_S / PERIOD_S))
        self._number = 0

    def start(self) -> None:
        signal.signal(signal.SIGPROF, self._take)
        signal.setitimer(signal.ITIMER_PROF, PERIOD_S, PERIOD_S)

    def _take(self, number: int, frame: FrameType | None) -> None:
        self._kept.append(stack_of(frame))
        self._number += 1
        if self._number % _WRITE_EVERY == 0:
            lines = [f"{count} {stack}" for stack, count in Counter(self._kept).most_common()]
            self._path.write_text("\n".join(lines) + "\n", encoding="utf-8")


class SampledWorker(PipeMaxGpuWorker):
    """A stage whose host time is sampled."""

    def init_device(self) -> Any:
        if path := os.environ.get("SAMPLES"):
            Samples(Path(path)).start()
        return super().init_device()
