"""End a command that holds an engine when it is told to: close the engine, or kill its processes."""

import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from pipemax.node.lifetime import SIGTERM_CLOSE_S
from pipemax.node.process_tree import kill_engine_processes

log = logging.getLogger(__name__)

_STATUS = 128 + signal.SIGTERM
"""The exit status by which shells know a command that SIGTERM ended."""


@contextmanager
def ends_on_sigterm() -> Iterator[None]:
    """Leave the block on SIGTERM, which closes its engine, and end the process.

    If that takes longer than ``SIGTERM_CLOSE_S``, the engine's processes are killed. Without this, SIGTERM would end
    this process only, and the engine's processes could keep the GPU.
    """

    def leave(number: int, frame: FrameType | None) -> None:
        # Until this process has ended: what starts an engine may be left without closing what has been started.
        threading.Thread(target=_end_later, name="ending", daemon=True).start()
        raise SystemExit(_STATUS)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _end_later() -> None:
    time.sleep(SIGTERM_CLOSE_S)
    log.error("the engine did not close within %.0f s after SIGTERM and is killed", SIGTERM_CLOSE_S)
    if running := kill_engine_processes():
        log.error("the engine's processes %s do not end although they are killed", running)
    os._exit(_STATUS)
