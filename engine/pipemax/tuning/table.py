"""What is known of a table's rows and of the engine, and the limits that are worth trying on them.

Two numbers explain most of what limits do. The KV cache holds R rows, and a steady engine computes R·(1 + P/O) tokens a
step, of P prompt tokens and O output tokens a row. Larger steps change nothing, smaller ones shrink the decode batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

import numpy as np
import numpy.typing as npt

from pipemax.domain.specs import KvCapacity
from pipemax.domain.step_records import StepLimits

Ints = npt.NDArray[np.int64]

SWEEP_ROWS = (0.25, 0.5, 1.0)
"""Shares of the rows that the KV cache holds, ascending: rows that run are added, and none has to end first."""
SWEEP_TOKENS = (0.5, 1.0, None, None, 1.0, 0.5)
"""Multiples of the tokens of a steady engine's step, and the default's; there and back, so that a drift cancels."""
_CANDIDATE_ROWS = (0.5, 0.65, 0.8, 0.9, 1.0, 1.15, 1.35)
"""Shares of the rows that the KV cache holds."""
_ENOUGH_TOKENS = 1.5
_CANDIDATE_TOKENS = (0.5, 0.75, 1.0, 3.0)
"""Multiples of the tokens of a steady engine's step, next to ``_ENOUGH_TOKENS``."""
_ROWS_TO_KNOW_LENGTHS = 50
_TOKENS_MULTIPLE = 64
_ROWS_MULTIPLE = 8
"""CUDA graphs are captured for multiples of it."""


def _no_lengths() -> Ints:
    return np.zeros(0, dtype=np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Rows that have ended: arrays of equal length, one entry for each row."""

    prompt_tokens: Ints = field(default_factory=_no_lengths)
    """Of the whole prompt."""
    output_tokens: Ints = field(default_factory=_no_lengths)
    found_tokens: Ints = field(default_factory=_no_lengths)
    """Prompt tokens found in the prefix cache; may be left out."""

    def __post_init__(self) -> None:
        if len(self.prompt_tokens) != len(self.output_tokens):
            raise ValueError(
                f"{len(self.prompt_tokens)} prompt lengths, but {len(self.output_tokens)} output lengths"
            )
        if len(self.found_tokens) not in (0, len(self.prompt_tokens)):
            raise ValueError(f"{len(self.prompt_tokens)} prompts, but {len(self.found_tokens)} found_tokens")

    def __len__(self) -> int:
        return len(self.prompt_tokens)

    def joined(self, later: Self, *, max_rows: int) -> Self:
        """Return these rows and later ones; of more than ``max_rows``, the last."""
        both = [
            np.concatenate([first, second])[-max_rows:]
            for first, second in (
                (self.prompt_tokens, later.prompt_tokens),
                (self.output_tokens, later.output_tokens),
                (self._all_found(), later._all_found()),
            )
        ]
        return type(self)(prompt_tokens=both[0], output_tokens=both[1], found_tokens=both[2])

    def of_the_table(self, outputs_so_far: Ints) -> tuple[Self, float]:
        """Return as many rows with lengths as frequent as in the table, and the share of rows longer than all ended.

        ``outputs_so_far``: of the rows that still run. The first rows to end are the short ones, so each row that ended
        stands for the running ones too that may end at its length (Kaplan and Meier, 1958). Rows longer than all that
        ended have as many tokens beyond these as the longest fifth has beyond the others.
        """
        if not len(self):
            return self, 1.0
        order = np.argsort(self.output_tokens, kind="stable")
        outputs = self.output_tokens[order]
        running = len(outputs_so_far) - np.searchsorted(np.sort(outputs_so_far), outputs)
        longer = np.cumprod(1 - 1 / (np.arange(len(self), 0, -1) + running))
        shares = (np.arange(len(self)) + 0.5) / len(self)
        ranks = np.searchsorted(1 - longer, shares)
        chosen = order[np.minimum(ranks, len(self) - 1)]
        outputs = self.output_tokens[chosen]
        beyond = outputs[-len(outputs) // 5 :] - outputs[-len(outputs) // 5]
        outputs[ranks == len(self)] += round(float(beyond.mean()))
        rows = type(self)(
            prompt_tokens=self.prompt_tokens[chosen],
            output_tokens=outputs,
            found_tokens=self._all_found()[chosen],
        )
        return rows, float(longer[-1])

    def _all_found(self) -> Ints:
        return self.found_tokens if len(self.found_tokens) else np.zeros_like(self.prompt_tokens)

    @property
    def mean_prompt(self) -> float:
        return float(self.prompt_tokens.mean())

    @property
    def mean_found(self) -> float:
        return float(self.found_tokens.mean()) if len(self.found_tokens) else 0.0

    @property
    def mean_output(self) -> float:
        return max(1.0, float(self.output_tokens.mean()))

    @property
    def mean_kv(self) -> float:
        """KV tokens of a running row on average: rows with long outputs run for longer. What was found is shared."""
        computed = self.prompt_tokens - self._all_found()
        return float(np.average(computed + self.output_tokens / 2, weights=self.output_tokens))

    @property
    def prompts_per_output(self) -> float:
        """Prompt tokens to compute for each output token."""
        return (self.mean_prompt - self.mean_found) / self.mean_output


@dataclass(frozen=True, slots=True, kw_only=True)
class Envelope:
    """The engine as it was started: what its limits may be, and the KV that it holds. All replicas are equal."""

    default: StepLimits
    """vLLM's default."""
    ceiling: StepLimits
    """What the engine was started for; no limit exceeds it."""
    capacity: KvCapacity
    """KV blocks under stock vLLM."""
    least_step_tokens: int = 64
    """A step must hold a block of a hybrid model's states, and one image."""

    def __post_init__(self) -> None:
        default, ceiling = self.default, self.ceiling
        if default.step_tokens > ceiling.step_tokens or default.running_rows > ceiling.running_rows:
            raise ValueError(f"the default {default} exceeds the ceiling {ceiling}")
        if not 1 <= self.least_step_tokens <= default.step_tokens:
            raise ValueError(
                f"least_step_tokens is {self.least_step_tokens}, must lie within [1, {default.step_tokens}]"
            )

    def rows_that_fit(self, lengths: Lengths) -> float:
        """Return how many running rows' KV the engine holds."""
        return max(1.0, self.capacity.gpu_rows(lengths.mean_kv + self.capacity.block_tokens / 2))

    def limits(self, step_tokens: float, running_rows: float) -> StepLimits:
        """Return the nearest limits that the engine can take. A step has a token for each row that runs."""
        rows = min(self.ceiling.running_rows, max(1, round(running_rows)))
        if rows > _ROWS_MULTIPLE:
            rows -= rows % _ROWS_MULTIPLE
        tokens = max(
            self.least_step_tokens, rows, -(-round(step_tokens) // _TOKENS_MULTIPLE) * _TOKENS_MULTIPLE
        )
        tokens = min(self.ceiling.step_tokens, tokens)
        return StepLimits(step_tokens=tokens, running_rows=min(rows, tokens))


def sweep_limits(
    envelope: Envelope, lengths: Lengths, share_of_rows: float, tokens: float | None
) -> StepLimits:
    """Return the limits of one setting of the sweep, in shares of what is known so far."""
    if len(lengths) < _ROWS_TO_KNOW_LENGTHS:
        rows, steady = float(envelope.ceiling.running_rows), envelope.ceiling.step_tokens / 2
    else:
        rows = min(envelope.rows_that_fit(lengths), envelope.ceiling.running_rows)
        steady = steady_step_tokens(rows, lengths)
    step_tokens = envelope.default.step_tokens if tokens is None else tokens * steady
    return envelope.limits(step_tokens, share_of_rows * rows)


def steady_step_tokens(rows: float, lengths: Lengths) -> float:
    """Return R·(1 + P/O): the tokens of a step in which ``rows`` decode and as many prompts begin as rows end."""
    return rows * (1 + lengths.prompts_per_output)


def row_candidates(envelope: Envelope, lengths: Lengths) -> Sequence[StepLimits]:
    """Return limits that differ in rows, in steps that hinder none of them; the default first. All differ."""
    fit = envelope.rows_that_fit(lengths)
    limits = [envelope.default]
    for share in _CANDIDATE_ROWS:
        rows = min(share * fit, envelope.ceiling.running_rows)
        limits.append(envelope.limits(_ENOUGH_TOKENS * steady_step_tokens(rows, lengths), rows))
    return [*dict.fromkeys(limits)]


def token_candidates(envelope: Envelope, lengths: Lengths, running_rows: int) -> Sequence[StepLimits]:
    """Return limits with so many rows that differ in the tokens of a step. All differ."""
    rows = min(running_rows, envelope.rows_that_fit(lengths))
    steady = steady_step_tokens(rows, lengths)
    return [*dict.fromkeys(envelope.limits(times * steady, running_rows) for times in _CANDIDATE_TOKENS)]
