"""Notice a step of the engine that does not return: a worker that hangs raises nothing by itself."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

STEP_TIMEOUT_S = 600.0
"""Longer than vLLM's own limit for one execution of the model, and than any step of a healthy engine."""


class StepWatch:
    """Watches the steps of one thread for another thread."""

    def __init__(self, timeout_s: float = STEP_TIMEOUT_S) -> None:
        self._timeout_s = timeout_s
        self._began_s: float | None = None

    @contextmanager
    def step(self) -> Iterator[None]:
        """Mark one step, from entry to exit."""
        self._began_s = time.monotonic()
        try:
            yield
        finally:
            self._began_s = None

    def fault(self) -> str | None:
        """Describe the fault once a step takes too long; ``None`` until then."""
        began_s = self._began_s
        if began_s is None or time.monotonic() - began_s < self._timeout_s:
            return None
        return f"the engine hangs: one step has not ended within {self._timeout_s:.0f} s"
