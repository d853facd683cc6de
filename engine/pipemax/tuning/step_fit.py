"""Fit a running engine's step times to the records of its steps, and count its work by what tokens cost.

Prompts and outputs pass the matrix products together, so a step's time is a line in pieces over all its tokens, and
outputs, prompt tokens and KV tokens each add something of their own. No piece falls; where a tile or a CUDA graph ends,
the next one may begin higher.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pipemax.control.controller_config import StageConfig
from pipemax.domain.step_records import StepRecords
from pipemax.domain.step_times import Segment, StepTimeModel

Floats = npt.NDArray[np.float64]

_KNOTS = (16, 32, 64, 128, 256, 512, 1024, 2048, 8192)
"""Tokens at which the slope may change; the ends of CUDA graphs are among them."""
_JUMPS = (64, 128, 256, 512)
"""Knots behind which a step may take longer at once."""
_MAX_STEPS = 6000
_FEWEST_STEPS = 50
_SD_OF_MEDIAN = 1.5
"""A standard deviation as a multiple of the median error."""
_OUTLIER = 5.0
"""Times the median error beyond which a step is not fitted."""
_RIDGE = 1e-7
_BIN_S = 10.0
"""Seconds of steps that share one deviation of the engine's speed, which is no step's own…"""
_BIN_SD = 0.02
"""…of this size; steps scatter by another ``_STEP_SD``."""
_STEP_SD = 0.03


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkCosts:
    """What one more of each adds to a step: the weights by which steps of different make-up are compared.

    A table has as many prompt tokens, output tokens and KV tokens to read whatever the limits, so its work is the same
    under all of them, if what preempted rows compute again is not counted.
    """

    prompt_token_s: float
    decode_s: float
    kv_token_s: float
    prompts_per_output: float
    """Prompt tokens that the table has for each output token; those found in the prefix cache are not among them."""

    def work_s(self, records: StepRecords) -> float:
        """Return the work of all these steps together.

        Of preempted rows' KV some is found in the prefix cache and some is computed again, which is no work. So where
        rows were preempted, prompt tokens beyond those of a steady engine count as computed again.
        """
        prompt_tokens, decodes = float(records.prompt_tokens.sum()), float(records.decodes.sum())
        dropped = float((records.preempted * records.kv_tokens / np.maximum(records.decodes, 1)).sum())
        beyond = max(0.0, prompt_tokens - self.prompts_per_output * decodes)
        return (
            self.prompt_token_s * (prompt_tokens - min(dropped, beyond))
            + self.decode_s * decodes
            + self.kv_token_s * float(records.kv_tokens.sum())
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFit:
    """The step times of a running engine."""

    stage: StageConfig
    """As a calibration has it; the sizes of KV and the copy rates are of no engine, for nothing is copied."""
    costs: WorkCosts
    error: float
    """Standard error of a fitted step's time, relative to it: the fewer the steps, the larger."""


def fit_steps(records: StepRecords, *, prompts_per_output: float) -> StepFit | None:
    """Return the fit, ``None`` for too few steps. ``prompts_per_output``: see ``WorkCosts``."""
    usable = np.flatnonzero((records.seconds > 0) & (records.prompt_tokens + records.decodes > 0))
    if len(usable) < _FEWEST_STEPS:
        return None
    times_s = np.cumsum(np.nan_to_num(records.seconds))
    usable = usable[np.linspace(0, len(usable) - 1, min(len(usable), _MAX_STEPS)).astype(np.int64)]
    prompts, decodes, kv_tokens, seconds = (
        array[usable].astype(np.float64)
        for array in (records.prompt_tokens, records.decodes, records.kv_tokens, records.seconds)
    )
    times_s = times_s[usable]
    tokens = prompts + decodes
    low, high = np.quantile(tokens, [0.02, 0.98])
    knots = (0, *(knot for knot in _KNOTS if low <= knot < high))
    pieces = [
        np.clip(tokens - first, 0, last - first)
        for first, last in zip(knots, (*knots[1:], np.inf), strict=True)
    ]
    jumps = [(tokens > knot).astype(np.float64) for knot in knots if knot in _JUMPS]
    columns = np.stack([np.ones_like(tokens), decodes, prompts, kv_tokens, *pieces, *jumps], axis=1)
    bins = (times_s // _BIN_S).astype(np.int64)
    kept, expected_s = np.ones(len(seconds), dtype=bool), seconds
    for _ in range(4):
        relative = np.column_stack([columns, seconds])[kept] / expected_s[kept, None]
        relative = _without_drift(relative, bins[kept])
        values = _non_negative_least_squares(relative[:, :-1], relative[:, -1])
        expected_s = columns @ values
        errors = np.abs(seconds / expected_s - 1)
        kept = errors <= max(0.01, _OUTLIER * float(np.median(errors)))
    stage = _stage(values, knots)
    costs = _costs(values, knots, tokens, prompts_per_output)
    error = _SD_OF_MEDIAN * float(np.median(errors)) * float(np.sqrt(columns.shape[1] / len(columns)))
    return StepFit(stage=stage, costs=costs, error=error)


def _without_drift(columns: Floats, bins: npt.NDArray[np.int64]) -> Floats:
    """Return columns less the share of each bin's mean that is due to the engine's speed at that time."""
    _, index, counts = np.unique(bins, return_inverse=True, return_counts=True)
    means = np.stack([np.bincount(index, column) / counts for column in columns.T], axis=1)
    shares = 1 - 1 / np.sqrt(1 + counts * _BIN_SD**2 / _STEP_SD**2)
    return np.asarray(columns - shares[index, None] * means[index], dtype=np.float64)


def _stage(values: Floats, knots: tuple[int, ...]) -> StageConfig:
    fixed, per_decode, per_prompt_token, per_kv_token = values[:4].tolist()
    slopes = values[4 : 4 + len(knots)].tolist()
    heights = dict(
        zip([knot for knot in knots if knot in _JUMPS], values[4 + len(knots) :].tolist(), strict=True)
    )

    def model(extra: float, beta_s: float) -> StepTimeModel:
        segments, height = [], fixed
        for index, (first, slope) in enumerate(zip(knots, slopes, strict=True)):
            if index:
                height += slopes[index - 1] * (first - knots[index - 1]) + heights.get(first, 0.0)
            segments.append(
                Segment(min_size=first + 1, alpha_s=slope + extra, delta_s=height - slope * first)
            )
        return StepTimeModel(segments=tuple(segments), beta_s=beta_s)

    return StageConfig(
        kv_bytes_per_token=1,
        h2d_bytes_per_s=1.0,
        decode_time=model(per_decode, per_kv_token),
        prefill_time=model(per_prompt_token, 0.0),
    )


def _costs(values: Floats, knots: tuple[int, ...], tokens: Floats, prompts_per_output: float) -> WorkCosts:
    """Return the costs at the middle of the steps, never 0: an engine that waits for its weights still works."""
    _, per_decode, per_prompt_token, per_kv_token = values[:4].tolist()
    slopes = values[4 : 4 + len(knots)].tolist()
    typical = float(np.median(tokens))
    slope = slopes[max(index for index, first in enumerate(knots) if first <= typical)]
    least = 0.02 * float(np.dot(slopes, np.diff([*knots, max(typical, knots[-1] + 1)]))) / max(1.0, typical)
    least = max(least, 1e-9)
    return WorkCosts(
        prompt_token_s=max(least, slope + per_prompt_token),
        decode_s=max(least, slope + per_decode),
        kv_token_s=per_kv_token,
        prompts_per_output=prompts_per_output,
    )


def _non_negative_least_squares(columns: Floats, targets: Floats) -> Floats:
    """Return the x ≥ 0 that minimizes |columns · x − targets| (Lawson and Hanson, 1974)."""
    scales = np.sqrt((columns**2).sum(axis=0))
    scales[scales == 0] = 1.0
    scaled = columns / scales
    gram = scaled.T @ scaled + _RIDGE * np.eye(len(scales))
    aims = scaled.T @ targets
    solution = np.zeros(len(scales))
    free = np.zeros(len(scales), dtype=bool)
    for _ in range(10 * len(scales)):
        slack = aims - gram @ solution
        slack[free] = 0.0
        best = int(np.argmax(slack))
        if slack[best] <= 1e-10 * len(targets):
            break
        free[best] = True
        while True:
            trial = np.zeros_like(solution)
            trial[free] = np.linalg.solve(gram[np.ix_(free, free)], aims[free])
            if trial[free].min() > 0:
                solution = trial
                break
            falling = free & (trial <= 0)
            step = float((solution[falling] / (solution[falling] - trial[falling] + 1e-300)).min())
            solution += step * (trial - solution)
            free &= solution > 1e-14
            solution[~free] = 0.0
            if not free.any():
                break
    return np.asarray(solution / scales, dtype=np.float64)
