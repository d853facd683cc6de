"""Turns measured steps into a calibration: chooses the work to run, fits its times, and judges the fit.

It is pure and knows neither an engine nor a clock: ``pipemax.vllm_ext.calibration`` runs the work and hands over the
times. Steps with similar work are first reduced to their median, so that a machine's other work weighs little.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from statistics import median

from pipemax.control.controller_config import StageConfig
from pipemax.control.times.estimator import (
    MixedWork,
    PhaseWork,
    PredictionError,
    ProfileRow,
    Work,
    fit_step_time,
)
from pipemax.domain.plan import Phase
from pipemax.domain.step_times import StepTimeModel, mixed_step_s

WAVE_OUTPUT_TOKENS = 8
"""Decode steps of each batch in a wave; the first shrinks as the last prompts join."""
_FIRST_WAVES = 7
"""A single request, both ends of each context's batches."""
_SEGMENT_CHOICES = (4, 2, 1)
_SAME_CONTEXT = 1.3
"""Steps of one batch size whose mean contexts differ by less than this factor count as alike."""
_FEWEST_COPIED_BLOCKS = 4
"""A copy of fewer blocks measures its latency, not the link."""
_USUAL_TOKENS = 512
"""KV of a row, for the largest decode batch that is measured however little time there is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedStep:
    """What a step computed, and how long each stage took."""

    work: Work
    stage_s: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedCopy:
    """One step's prefetch, host → GPU."""

    num_blocks: int
    stage_s: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Profile:
    """What was timed on an engine for a while."""

    steps: list[TimedStep]
    copies: list[TimedCopy]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wave:
    """Requests that are sent together and have all ended before the next wave."""

    num_requests: int
    prompt_tokens: int
    output_tokens: int = WAVE_OUTPUT_TOKENS

    @property
    def kv_tokens(self) -> int:
        return self.num_requests * (self.prompt_tokens + self.output_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class WaveLimits:
    """The engine's limits."""

    num_batches: int
    max_num_seqs: int
    max_model_len: int
    gpu_kv_tokens: int
    host_kv_tokens: int
    most_wave_tokens: int | None = None
    """Maximum KV tokens of a wave, for callers with little time; None lets waves fill the GPU's pool, and one overflow
    it."""


def design_waves(limits: WaveLimits) -> list[Wave]:
    """Return the waves to run: decode batches from 1 to the largest that fits × short, middle and long contexts.

    The corners come first, so that a caller that stops early has seen the range; then a wave that overflows the GPU,
    for the copies, and short rows in batches as large as those of the GPU's pool full of usual ones, whatever
    ``most_wave_tokens``. The prompts bring prefill chunks of all sizes with them.
    """
    longest = limits.max_model_len - WAVE_OUTPUT_TOKENS
    contexts = sorted({max(1, min(longest, 16)), max(1, longest // 4), max(1, longest)})
    grid: list[list[Wave]] = []
    room = min(limits.gpu_kv_tokens, limits.most_wave_tokens or limits.gpu_kv_tokens)
    for context in contexts:
        fits = room // (context + WAVE_OUTPUT_TOKENS)
        max_size = max(1, min(limits.max_num_seqs, fits // limits.num_batches))
        sizes = _powers_up_to(max_size)
        grid.append(
            [Wave(num_requests=size * limits.num_batches, prompt_tokens=context) for size in _corners(sizes)]
        )
    waves = [Wave(num_requests=1, prompt_tokens=contexts[0], output_tokens=2 * WAVE_OUTPUT_TOKENS)]
    waves += [row[index] for index in range(max(map(len, grid))) for row in grid if index < len(row)]
    # After the corners: the budget of the copies is worth more than another size.
    extra = [_overflowing_wave(limits, contexts[len(contexts) // 2]), _usual_batches(limits, contexts[0])]
    return [*waves[:5], *[wave for wave in extra if wave and wave not in waves], *waves[5:]]


def affordable_wave_tokens(wave: Wave, seconds: float, *, time_limit_s: float) -> int:
    """Return how many KV tokens each of the first waves may have, if they are to end within the limit together.

    ``wave`` took ``seconds``. Its requests fill no step, so larger waves take less time per token.
    """
    tokens_per_s = wave.kv_tokens / max(seconds, 1e-9)
    return max(wave.kv_tokens, int(tokens_per_s * time_limit_s / _FIRST_WAVES))


def _overflowing_wave(limits: WaveLimits, context: int) -> Wave | None:
    tokens = context + 2 * WAVE_OUTPUT_TOKENS
    num_requests = math.ceil(1.5 * limits.gpu_kv_tokens / tokens)
    max_tokens = min(limits.host_kv_tokens, 2 * (limits.most_wave_tokens or limits.host_kv_tokens))
    if num_requests * tokens > max_tokens:
        return None
    return Wave(num_requests=num_requests, prompt_tokens=context, output_tokens=2 * WAVE_OUTPUT_TOKENS)


def _usual_batches(limits: WaveLimits, context: int) -> Wave | None:
    size = min(limits.max_num_seqs, limits.gpu_kv_tokens // (limits.num_batches * _USUAL_TOKENS))
    wave = Wave(num_requests=size * limits.num_batches, prompt_tokens=context)
    return wave if size > 1 and wave.kv_tokens <= limits.gpu_kv_tokens else None


def _powers_up_to(limit: int) -> list[int]:
    sizes = [1 << power for power in range(limit.bit_length())]
    return sizes if sizes[-1] == limit else [*sizes, limit]


def _corners(sizes: list[int]) -> list[int]:
    """Reorder sizes: the largest, the smallest, then those that halve what is left."""
    if len(sizes) < 3:
        return sizes[::-1]
    order, rest = [sizes[-1], sizes[0]], sizes[1:-1]
    while rest:
        middle = rest.pop(len(rest) // 2)
        order.append(middle)
    return order


# Fitting.


def fit_stages(
    steps: Sequence[TimedStep],
    copies: Sequence[TimedCopy],
    *,
    kv_bytes_per_token: Sequence[int],
    block_tokens: int,
    default_h2d_bytes_per_s: float,
) -> tuple[StageConfig, ...]:
    """Fit each stage's coefficients, one entry per stage, with the default B where nothing was copied.

    Raise ``ValueError`` without steps of both phases.
    """
    stages = []
    for stage, kv_bytes in enumerate(kv_bytes_per_token):
        rate = _copy_bytes_per_s(copies, stage, block_bytes=block_tokens * kv_bytes)
        stages.append(
            StageConfig(
                kv_bytes_per_token=kv_bytes,
                h2d_bytes_per_s=rate or default_h2d_bytes_per_s,
                decode_time=fit_measured(profile_rows(steps, Phase.DECODE, stage)),
                prefill_time=fit_measured(profile_rows(steps, Phase.PREFILL, stage)),
            )
        )
    return tuple(stages)


def profile_rows(steps: Iterable[TimedStep], phase: Phase, stage: int) -> list[ProfileRow]:
    """Return one row for each group of similar steps of a phase on a stage: their median."""
    groups: defaultdict[tuple[int, int], list[ProfileRow]] = defaultdict(list)
    for step in steps:
        work, seconds = step.work, step.stage_s[stage]
        if isinstance(work, PhaseWork) and work.phase is phase and seconds > 0:
            context = max(1.0, work.kv_tokens / work.size)
            key = (work.size, round(math.log(context, _SAME_CONTEXT)))
            groups[key].append(ProfileRow(size=work.size, kv_tokens=work.kv_tokens, seconds=seconds))
    return [
        ProfileRow(
            size=size,
            kv_tokens=round(median(row.kv_tokens for row in rows)),
            seconds=median(row.seconds for row in rows),
        )
        for (size, _), rows in sorted(groups.items())
    ]


def fit_measured(rows: Sequence[ProfileRow]) -> StepTimeModel:
    """Fit as ``fit_step_time``, with fewer segments while one says that a larger batch is faster: that is noise."""
    if not rows:
        raise ValueError("nothing was measured of one of the phases; give the calibration more time")
    for max_segments in _SEGMENT_CHOICES:
        model = fit_step_time(rows, max_segments=max_segments)
        if _never_gains_by_size(model):
            return model
    return _through_origin_or_flat(rows, model)


def _never_gains_by_size(model: StepTimeModel) -> bool:
    """Return whether no line falls, and none begins below the end of the line before it."""
    lines = model.segments
    return all(line.alpha_s >= 0 and line.delta_s >= 0 for line in lines) and all(
        model.batch_s(line.min_size) >= model.batch_s(line.min_size - 1) for line in lines[1:]
    )


def _through_origin_or_flat(rows: Sequence[ProfileRow], line: StepTimeModel) -> StepTimeModel:
    """Return the line without its negative coefficient, at the median of the measured times."""
    if line.segments[0].alpha_s < 0:
        return StepTimeModel.linear(alpha_s=0.0, beta_s=0.0, delta_s=median(row.seconds for row in rows))
    per_unit = median(row.seconds / row.size for row in rows)
    return StepTimeModel.linear(alpha_s=per_unit, beta_s=0.0, delta_s=0.0)


def _copy_bytes_per_s(copies: Iterable[TimedCopy], stage: int, *, block_bytes: int) -> float | None:
    timed = [copy for copy in copies if copy.num_blocks >= _FEWEST_COPIED_BLOCKS and copy.stage_s[stage] > 0]
    if not timed:
        return None
    return median(copy.num_blocks * block_bytes / copy.stage_s[stage] for copy in timed)


def round_trip_s(
    token_gaps_s: Sequence[float], steps: Iterable[TimedStep], *, num_batches: int
) -> list[float]:
    """Return the seconds by which a batch's step exceeds its time on the stages, measured in one wave.

    The wave has no more batches than there are stages; they take turns, and tokens come out once per step. The list has
    at most one value, and none for a wave without decode steps.
    """
    decode_s = [sum(step.stage_s) for step in steps if step.work.phase is Phase.DECODE]
    if not (token_gaps_s and decode_s):
        return []
    return [max(0.0, num_batches * median(token_gaps_s) - median(decode_s))]


# Judging.


def step_s(stage: StageConfig, work: Work) -> float:
    """Return the seconds that a stage's coefficients predict of a step."""
    if isinstance(work, MixedWork):
        return mixed_step_s(
            stage.decode_time, stage.prefill_time, **asdict(work), mixed_scales=stage.mixed_scales
        )
    model = stage.decode_time if work.phase is Phase.DECODE else stage.prefill_time
    return model.seconds(work.size, work.kv_tokens)


def predicted_and_measured(
    stages: Sequence[StageConfig], steps: Iterable[TimedStep], phase: Phase
) -> list[tuple[float, float]]:
    """Return (predicted, measured) seconds of each step of a phase on each stage."""
    return [
        (step_s(stage, step.work), measured_s)
        for step in steps
        if step.work.phase is phase
        for stage, measured_s in zip(stages, step.stage_s, strict=True)
        if measured_s > 0
    ]


def prediction_error(pairs: Sequence[tuple[float, float]]) -> PredictionError:
    """Return the errors of (predicted, measured) seconds; zeros without any."""
    return PredictionError.of(
        measured_s / predicted_s for predicted_s, measured_s in pairs if predicted_s > 0
    )
