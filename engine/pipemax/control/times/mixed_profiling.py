"""Mixed steps in a calibration: which rows to run, and what their prompt tokens were measured to add to decodes.

Like ``profiling``, it is pure and knows neither an engine nor a clock.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random
from statistics import median

from pipemax.control.controller_config import StageConfig
from pipemax.control.times.estimator import MixedWork
from pipemax.control.times.profiling import TimedStep, WaveLimits, step_s
from pipemax.domain.step_times import DECODE_SHARES

_FEWEST_MIXED_STEPS = 8
_ALIKE_SCALES = 1.1
"""Scales of mixed steps that differ by no more than this factor are one."""
_LEAST_ADDED_SHARE = 0.1
"""Prompt tokens that add less than this share of the decodes' time drown in its spread."""
_MIXED_SCALE_RANGE = (0.25, 4.0)
"""A scale beyond this would say that the other fits are wrong."""
_MIXED_DECODES = 64
"""Of a mixed step. Its prompt tokens follow from the share of decodes."""
_MIXED_ROW_TOKENS = 40
"""Of a prompt and its output: where the outputs are a share of it, so are the decodes of the steps."""
_MIXED_STEPS = 12
"""Of each batch and share, once as many rows decode as shall."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedRows:
    """Rows whose mixed steps settle at a share of decodes."""

    step_tokens: int
    lengths: list[tuple[int, int]]
    """(prompt, output) tokens."""


def mixed_rows(limits: WaveLimits, share: float, *, most_step_tokens: int, rng: Random) -> MixedRows:
    """Return rows that are to be sent together, and the size of the steps that they fill.

    In the long run each row has a prompt's tokens and an output's in the steps, so that the decodes' share is the
    outputs' share of the rows.
    """
    decodes = max(1, min(_MIXED_DECODES, limits.max_num_seqs, round(share * most_step_tokens)))
    step_tokens = min(most_step_tokens, max(decodes + 1, round(decodes / share)))
    row_tokens = min(_MIXED_ROW_TOKENS, limits.max_model_len // 2)
    output = max(2, round(share * row_tokens))
    prompt = max(1, row_tokens - output)
    room = limits.gpu_kv_tokens // (2 * row_tokens)
    joining = math.ceil(_MIXED_STEPS * (step_tokens - decodes) / prompt)
    count = max(limits.num_batches, min(room, limits.num_batches * (decodes + joining)))
    lengths = [(rng.randint(1, 2 * prompt - 1), rng.randint(1, 2 * output - 1)) for _ in range(count)]
    return MixedRows(step_tokens=step_tokens, lengths=lengths)


def describe_scales(scales: tuple[float, ...]) -> str:
    """Return the scales of mixed steps in words."""
    if len(scales) == 1:
        return f"{scales[0]:.2f}"
    shares = ", ".join(f"{share:.0%}" for share in DECODE_SHARES)
    return f"{', '.join(f'{scale:.2f}' for scale in scales)} (at {shares} decodes)"


def with_mixed_scales(stages: Sequence[StageConfig], steps: Sequence[TimedStep]) -> tuple[StageConfig, ...]:
    """Return the stages with their ``mixed_scales`` fitted to mixed steps, which stay where too few were measured.

    A scale is the median over the steps in which prompt tokens weigh enough to tell: one for all of them, or one for
    each share of decodes if they differ. A share of which too few steps were measured has its neighbour's.
    """
    fitted = []
    for index, stage in enumerate(stages):
        ratios: list[list[float]] = [[] for _ in DECODE_SHARES]
        unscaled = replace(stage, mixed_scales=(1.0,))
        for step in steps:
            work = step.work
            if not isinstance(work, MixedWork):
                continue
            decode_s = stage.decode_time.seconds(work.num_decodes, work.kv_tokens)
            added_s = step_s(unscaled, work) - decode_s
            if step.stage_s[index] > 0 and added_s >= _LEAST_ADDED_SHARE * decode_s:
                share = work.num_decodes / (work.num_decodes + work.prompt_tokens)
                place = min(len(DECODE_SHARES) - 1, int(share * len(DECODE_SHARES)))
                ratios[place].append((step.stage_s[index] - decode_s) / added_s)
        fitted.append(replace(stage, mixed_scales=_scales_of(ratios) or stage.mixed_scales))
    return tuple(fitted)


def _scales_of(ratios: Sequence[Sequence[float]]) -> tuple[float, ...] | None:
    """Return one scale, or one for each share; None for too few steps."""
    together = [ratio for of_share in ratios for ratio in of_share]
    if len(together) < _FEWEST_MIXED_STEPS:
        return None
    known = {
        place: _bounded(median(of_share))
        for place, of_share in enumerate(ratios)
        if len(of_share) >= _FEWEST_MIXED_STEPS
    }
    if not known or max(known.values()) <= _ALIKE_SCALES * min(known.values()):
        return (_bounded(median(together)),)
    return tuple(
        known[min(known, key=lambda other: abs(other - place))] for place in range(len(DECODE_SHARES))
    )


def _bounded(scale: float) -> float:
    lowest, highest = _MIXED_SCALE_RANGE
    return min(highest, max(lowest, scale))
