"""Learn from a job's finished rows whether longer prompts have longer answers.

The driver orders the rows of the table's last chunk by it. This module knows only lengths.
"""

import math
from collections.abc import Sequence

from pipemax.api import Completion

MIN_ROWS = 200
"""Fewer rows say little, and the first to finish are those with short answers."""
MEMORY = 10_000
"""Number of rows from which on older ones count less: a table's later rows may be others."""


class LengthRelation:
    """The correlation of the logarithms of prompt and answer lengths. Not thread-safe."""

    def __init__(self) -> None:
        self._num_rows = 0
        self._mean_prompt = self._mean_output = 0.0
        self._var_prompt = self._var_output = self._covariance = 0.0

    def observe(self, completions: Sequence[Completion]) -> None:
        """Learn from rows that have ended. Error rows say nothing, and answers of equal rows nothing more."""
        for completion in completions:
            if completion.error is None and not completion.is_reused:
                self._add(math.log1p(completion.prompt_tokens), math.log1p(completion.completion_tokens))

    def correlation(self) -> float | None:
        """Return the correlation, from -1 to 1; None while few rows have ended, 0 if a length is always the same."""
        if self._num_rows < MIN_ROWS:
            return None
        spread = math.sqrt(self._var_prompt * self._var_output)
        return self._covariance / spread if spread > 1e-12 else 0.0

    def _add(self, prompt: float, output: float) -> None:
        self._num_rows += 1
        share = 1 / min(self._num_rows, MEMORY)
        prompt_step, output_step = prompt - self._mean_prompt, output - self._mean_output
        self._mean_prompt += share * prompt_step
        self._mean_output += share * output_step
        self._var_prompt += share * ((1 - share) * prompt_step**2 - self._var_prompt)
        self._var_output += share * ((1 - share) * output_step**2 - self._var_output)
        self._covariance += share * ((1 - share) * prompt_step * output_step - self._covariance)
