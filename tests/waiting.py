"""Waiting for what another thread or process will do."""

import time
from collections.abc import Callable
from typing import Any


def wait_until(condition: Callable[[], Any], within_s: float = 120.0, what: str = "") -> float:
    """How many seconds it took; fails after ``within_s``."""
    started_s = time.monotonic()
    while not condition():
        assert time.monotonic() - started_s < within_s, f"not within {within_s} s: {what}"
        time.sleep(0.02)
    return time.monotonic() - started_s
