"""Size the window: turn what the engine says it can take in from tokens into rows."""

import time
from collections.abc import Sequence

from pipemax.api import Completion, Engine
from pipemax.config import EngineConfig
from pipemax.serve.flow.credit import CreditWindow

FLOOR_FACTOR = 3
"""The window is never below this many times the sequences of all replicas: a step's worth running and two waiting."""
DEFAULT_MAX_NUM_SEQS = 256
"""vLLM's usual value, for a config that leaves the choice to vLLM."""
FIRST_GUESS_TOKENS_PER_ROW = 512.0
"""Used until rows have finished, or the engine says how many tokens a request takes."""
_RESIZE_PERIOD_S = 0.05
_MEMORY = 0.99
"""Weight of the past in the running mean of tokens per row: about the last hundred rows count."""


class Pacer:
    """Keeps the window as large as the engine can use. Called on the engine's thread only."""

    def __init__(self, window: CreditWindow) -> None:
        self._window = window
        self._tokens_per_row = FIRST_GUESS_TOKENS_PER_ROW
        self._config: EngineConfig | None = None
        self._resized_at_s = float("-inf")

    def learn(self, completions: Sequence[Completion]) -> None:
        """Learn how long rows are; error rows say nothing about it."""
        for completion in completions:
            if completion.error is None:
                tokens = completion.prompt_tokens + completion.completion_tokens
                self._tokens_per_row = _MEMORY * self._tokens_per_row + (1 - _MEMORY) * max(1, tokens)

    def resize(self, engine: Engine, config: EngineConfig, *, rows_left: int | None = None) -> bool:
        """Set the window from the engine's admission credit, not too often. Return ``True`` if it has grown.

        ``rows_left`` bounds what the engine takes beyond what it has: its share of the rows that are left.
        """
        now_s = time.monotonic()
        if config is self._config and now_s - self._resized_at_s < _RESIZE_PERIOD_S:
            return False
        self._config, self._resized_at_s = config, now_s
        # An engine that counts shared prefixes once knows better than the rows' lengths what a row costs.
        tokens_per_row = engine.stats().metrics.get("kv_tokens_per_request") or self._tokens_per_row
        # One chunk more than fits: only a request that no longer fits shows that memory is full.
        fitting_rows = int(engine.admission_credit_tokens() / tokens_per_row)
        more_rows = max(0, fitting_rows + self._window.limits.chunk_rows)
        running = self._window.running_rows
        num_seqs = config.num_replicas * (config.max_num_seqs or DEFAULT_MAX_NUM_SEQS)
        window = max(FLOOR_FACTOR * num_seqs, running + more_rows)
        return self._window.resize(window if rows_left is None else min(window, running + rows_left))
