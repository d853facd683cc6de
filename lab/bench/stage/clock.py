"""Times by the device's own clock: CUDA events, or the wall clock where the device is the CPU."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch


class Mark:
    """A moment of the current stream of a device."""

    def __init__(self, device: torch.device) -> None:
        self._event = torch.cuda.Event(enable_timing=True) if device.type == "cuda" else None
        if self._event is None:
            self._wall_s = time.perf_counter()
        else:
            self._event.record()

    def wait(self) -> None:
        """Wait until the device is past this moment."""
        if self._event is not None:
            self._event.synchronize()

    @property
    def is_past(self) -> bool:
        return self._event is None or self._event.query()

    def seconds_until(self, later: "Mark") -> float:
        """Return the seconds between two moments, both of which must be past."""
        if self._event is None:
            return later._wall_s - self._wall_s
        return self._event.elapsed_time(later._event) / 1e3


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """The times of repeated work."""

    median_s: float
    least_s: float
    most_s: float


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed(
    device: torch.device, work: Callable[[], None], *, repeats: int, finish: Callable[[], None] | None = None
) -> Times:
    """Time repeated work on a device, after one warm-up.

    ``work`` enqueues; ``finish`` makes the current stream wait for the part that other streams do.
    """
    seconds = []
    for repeat in range(repeats + 1):
        synchronize(device)
        begin = Mark(device)
        work()
        if finish is not None:
            finish()
        end = Mark(device)
        end.wait()
        if repeat:
            seconds.append(begin.seconds_until(end))
    return Times(median_s=statistics.median(seconds), least_s=min(seconds), most_s=max(seconds))
