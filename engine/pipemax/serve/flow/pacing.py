"""Size the window: turn what the engine says it can take in from tokens into rows."""

import math
import time
from collections.abc import Callable, Sequence

from pipemax.api import Completion, Engine
from pipemax.endpoint_config import AnyConfig
from pipemax.serve.flow.credit import CreditWindow

FLOOR_FACTOR = 1.5
"""The window is never below this many times the ``max_num_seqs`` of all replicas: all that may run, and half as many
waiting."""
DEFAULT_MAX_NUM_SEQS = 256
"""For a config that leaves the choice to vLLM, until the engine says what vLLM chose."""
FIRST_GUESS_TOKENS_PER_ROW = 512.0
"""Used until rows have finished, or the engine says how many tokens a request takes."""
_RESIZE_PERIOD_S = 0.05
_MEMORY = 0.99
"""Weight of the past in the running mean of tokens per row: about the last hundred rows count."""


class Pacer:
    """Keeps the window as large as the engine can use. Called on the engine's thread only."""

    def __init__(self, window: CreditWindow, clock: Callable[[], float] = time.monotonic) -> None:
        self._window = window
        self._clock = clock
        self._tokens_per_row = FIRST_GUESS_TOKENS_PER_ROW
        self._config: AnyConfig | None = None
        self._resized_at_s = float("-inf")

    def learn(self, completions: Sequence[Completion]) -> None:
        """Learn how long rows are; error rows say nothing about it."""
        for completion in completions:
            if completion.error is None:
                tokens = completion.prompt_tokens + completion.completion_tokens
                self._tokens_per_row = _MEMORY * self._tokens_per_row + (1 - _MEMORY) * max(1, tokens)

    def resize(self, engine: Engine, config: AnyConfig, *, rows_left: int | None = None) -> bool:
        """Set the window from the engine's admission credit, not too often. Return ``True`` if it has grown.

        ``rows_left`` bounds what the engine takes beyond what it has: its share of the rows that are left.
        """
        now_s = self._clock()
        if config is self._config and now_s - self._resized_at_s < _RESIZE_PERIOD_S:
            return False
        self._config, self._resized_at_s = config, now_s
        metrics = engine.stats().metrics
        if (wanted_rows := metrics.get("wanted_rows")) is not None:
            wanted = int(wanted_rows)
            running = self._window.running_rows
            return self._window.resize(wanted if rows_left is None else min(wanted, running + rows_left))
        # An engine that counts shared prefixes once knows better than the rows' lengths what a row costs.
        tokens_per_row = metrics.get("kv_tokens_per_request") or self._tokens_per_row
        # One chunk more than fits: only a request that no longer fits shows that memory is full.
        fitting_rows = int(engine.admission_credit_tokens() / tokens_per_row)
        more_rows = max(0, fitting_rows + self._window.limits.chunk_rows)
        running = self._window.running_rows
        configured = config.num_replicas * (config.max_num_seqs or DEFAULT_MAX_NUM_SEQS)
        num_seqs = metrics.get("max_num_seqs", configured)
        window = max(math.ceil(FLOOR_FACTOR * num_seqs), running + more_rows)
        return self._window.resize(window if rows_left is None else min(window, running + rows_left))
