"""Run a part of the proof in a process group of its own, end it at its limit, and keep what it printed."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TextIO

from lab.gpu.parts import Part, Places
from lab.gpu.side_by_side import ENVIRONMENT

_GRACE_S = 5.0
"""From SIGTERM, on which a part ends its engines, to SIGKILL at the limit."""


class PartProcess:
    """Implements ``proof.RunPart``. The output goes to this process's own too, and to a file for each part."""

    def __init__(self, places: Places, now_s: Callable[[], float] = time.monotonic) -> None:
        self._places = places
        self._now_s = now_s

    def __call__(self, part: Part, limit_s: float) -> int | None:
        deadline_s = self._now_s() + limit_s
        command = [sys.executable, *part.arguments(self._places, limit_s)]
        print(f"== {part.name}: {' '.join(command)}", flush=True)
        log = self._places.out / f"{part.name}.log"
        with log.open("w", encoding="utf-8") as file:
            process = subprocess.Popen(
                command,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=self._environment(),
                start_new_session=True,
            )
        try:
            # Not a pipe: one that an engine's process still holds would never end.
            with log.open(encoding="utf-8", errors="replace") as output:
                is_ended = self._wait(process, deadline_s - _GRACE_S, output)
                if not is_ended:
                    print(f"== {part.name} is ended: its time is over", flush=True)
                    _signal_group(process, signal.SIGTERM)
                    self._wait(process, deadline_s, output)
        finally:
            _signal_group(process, signal.SIGKILL)  # with whatever the part has left behind
            process.wait()
        return process.returncode if is_ended else None

    def output(self, part: Part) -> str:
        log = self._places.out / f"{part.name}.log"
        return log.read_text(encoding="utf-8", errors="replace")

    def _environment(self) -> dict[str, str]:
        caches = self._places.scratch / "cache"
        # Neither an earlier run's calibration nor its verdict on this machine.
        own = {
            "XDG_CACHE_HOME": caches,
            "VLLM_CACHE_ROOT": caches / "vllm",
            "TRITON_CACHE_DIR": caches / "triton",
        }
        return {**ENVIRONMENT, **os.environ, **{name: str(path) for name, path in own.items()}}

    def _wait(self, process: subprocess.Popen[bytes], deadline_s: float, output: TextIO) -> bool:
        """Pass output on until the process ends or the deadline. Return whether it has ended."""
        while process.poll() is None and self._now_s() < deadline_s:
            time.sleep(0.05)
            print(output.read(), end="", flush=True)
        print(output.read(), end="", flush=True)
        return process.poll() is not None


def _signal_group(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, number)
