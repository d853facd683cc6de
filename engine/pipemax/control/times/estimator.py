"""Estimates a stage's step times (PipeMax, §3.3.1, Equation 2): fits a profile, refines online, and tracks the errors.

The paper fits one line offline. Here the batch-size term may be piecewise, because matrix kernels jump at tile sizes:
``fit_step_time`` adds segments while the mean at some batch size errs by more than its tolerance, half of the paper's
worst error. The formula is ``domain.step_times``; nothing here knows what runs when.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Self

import numpy as np
from numpy.typing import NDArray

from pipemax.domain.plan import Phase
from pipemax.domain.step_times import Segment, StepTimeModel, mixed_scale

PAPER_WORST_ERROR = 0.08
"""PipeMax, §4.3.1: predictions deviate by less than this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileRow:
    """One measured step."""

    size: int
    """Requests (decode) or chunk tokens (prefill)."""
    kv_tokens: int
    """Σ L_i (decode) or (token, attended token) pairs (prefill)."""
    seconds: float


# Fitting.


def fit_step_time(rows: Sequence[ProfileRow], *, max_segments: int = 8) -> StepTimeModel:
    """Fit step times by least squares on relative errors: one line, or as many segments as the tolerance requires.

    A knot is a profiled batch size. While the mean at some batch size errs by more than the tolerance and fewer than
    ``max_segments`` are used, the knot that most lowers the squared errors is added. Jumps between neighbouring sizes
    are no segments. Raise ``ValueError`` without rows of positive time.
    """
    if not rows or any(row.size < 1 or row.kv_tokens < 0 or row.seconds <= 0 for row in rows):
        raise ValueError("a fit needs rows with size ≥ 1, kv_tokens ≥ 0 and seconds > 0")
    sizes = np.array([row.size for row in rows], dtype=np.float64)
    tokens = np.array([row.kv_tokens for row in rows], dtype=np.float64)
    seconds = np.array([row.seconds for row in rows], dtype=np.float64)
    candidates = sorted({row.size for row in rows})
    knots = sorted({candidates[0], candidates[-1]})
    fit = _fit_knots(knots, sizes, tokens, seconds)
    while _worst_by_size(fit.errors, sizes) > PAPER_WORST_ERROR / 2:
        longer = [sorted([*knots, knot]) for knot in candidates if knot not in knots]
        trials = [
            _fit_knots(trial, sizes, tokens, seconds)
            for trial in longer
            if len(_segment_starts(trial)) <= max_segments
        ]
        if not trials:
            break
        fit = min(trials, key=lambda trial: float(np.sum(trial.errors**2)))
        knots = fit.knots
    return fit.to_model()


@dataclass(frozen=True, slots=True)
class _Fit:
    knots: list[int]
    heights: NDArray[np.float64]
    """Seconds of the batch-size term at each knot."""
    beta_s: float
    errors: NDArray[np.float64]
    """Predicted / measured − 1, by row."""

    def to_model(self) -> StepTimeModel:
        segments: list[Segment] = []
        for index in _segment_starts(self.knots):
            left, right = self.knots[index], self.knots[index + 1]
            low, high = float(self.heights[index]), float(self.heights[index + 1])
            alpha_s = (high - low) / (right - left)
            # The first line also holds below the smallest profiled batch.
            min_size = left if segments else 1
            segments.append(Segment(min_size=min_size, alpha_s=alpha_s, delta_s=low - alpha_s * left))
        if not segments:
            segments.append(Segment(min_size=1, alpha_s=0.0, delta_s=float(self.heights[0])))
        return StepTimeModel(segments=tuple(segments), beta_s=self.beta_s)


def _segment_starts(knots: list[int]) -> list[int]:
    """Return the indices of the knots at which a segment begins.

    Between neighbouring sizes there is only a jump: no batch has a size on that slope.
    """
    last = len(knots) - 2
    return [
        index for index, (left, right) in enumerate(pairwise(knots)) if right > left + 1 or index in (0, last)
    ]


def _fit_knots(
    knots: list[int], sizes: NDArray[np.float64], tokens: NDArray[np.float64], seconds: NDArray[np.float64]
) -> _Fit:
    """Fit a piecewise linear function of the batch size plus β·L, by least squares on relative errors."""
    hats = np.array([np.interp(sizes, knots, row) for row in np.eye(len(knots))])  # (knots, rows)
    token_scale = max(float(tokens.max()), 1.0)
    columns = np.vstack([hats, tokens[None, :] / token_scale]).T / seconds[:, None]  # (rows, knots + 1)
    solution = np.linalg.lstsq(columns, np.ones_like(seconds), rcond=None)[0]
    if solution[-1] < 0:  # noise over a small range of L: attention never speeds a step up
        solution[:-1] = np.linalg.lstsq(columns[:, :-1], np.ones_like(seconds), rcond=None)[0]
        solution[-1] = 0.0
    return _Fit(
        knots,
        np.asarray(solution[:-1], dtype=np.float64),
        float(solution[-1]) / token_scale,
        columns @ solution - 1.0,
    )


def _worst_by_size(errors: NDArray[np.float64], sizes: NDArray[np.float64]) -> float:
    """Return the largest mean error at any one batch size: noise within a size does not justify another segment."""
    return max(abs(float(errors[sizes == size].mean())) for size in np.unique(sizes))


# Refining online.


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictionError:
    """The errors of recent predictions against measurements (the quantity of PipeMax, Figure 15)."""

    num_steps: int
    within_5_percent: float
    """Share of steps, 0 to 1."""
    worst: float
    """Largest |measured / predicted − 1|."""
    mean: float

    @classmethod
    def of(cls, ratios: Iterable[float]) -> Self:
        """Return the errors of measured / predicted times; zeros without any."""
        off = [abs(ratio - 1.0) for ratio in ratios]
        count = len(off)
        return cls(
            num_steps=count,
            within_5_percent=sum(error <= 0.05 for error in off) / count if count else 0.0,
            worst=max(off, default=0.0),
            mean=sum(off) / count if count else 0.0,
        )


class OnlineEstimator:
    """One stage's step time: a fitted model whose batch and attention terms are rescaled as steps are measured.

    The method is normalised least mean squares on relative errors: it keeps two scales and no history, and stays stable
    when all steps look alike. An outlier moves the scales no more than an error of ``OUTLIER`` times the median error
    would: a GPU's step that waits for something else takes twice its time, and one such step in fourteen would bias
    the mean by 4 %. ``MAX_ERROR`` bounds the first steps, when no median is known.
    """

    LEARNING_RATE = 0.05
    MAX_ERROR = 0.5
    OUTLIER = 3.0
    WINDOW = 256
    _MEDIAN_STEP = 1.1
    """The median error follows the errors by this factor a step: up for a larger one, down for a smaller one."""
    _LEAST_MEDIAN = 0.01

    def __init__(self, model: StepTimeModel) -> None:
        self.model = model
        self.batch_scale = 1.0
        self.kv_scale = 1.0
        self._ratios: deque[float] = deque(maxlen=self.WINDOW)
        self._median_error = self.MAX_ERROR / self.OUTLIER
        # Each plan asks for some ten sizes on every stage. The model does not change, so its answers are kept.
        self._batch_s: dict[int, float] = {}

    def batch_s(self, size: int) -> float:
        """Return the model's seconds without the KV and without the scale."""
        seconds = self._batch_s.get(size)
        if seconds is None:
            seconds = self._batch_s[size] = self.model.batch_s(size)
        return seconds

    def added_batch_s(self, size: int, more: int) -> float:
        """Return the model's ``added_batch_s``, without the scale."""
        return max(0.0, self.batch_s(size + more) - self.batch_s(size))

    def seconds(self, size: int, kv_tokens: int) -> float:
        if size == 0:
            return 0.0
        return self.batch_scale * self.batch_s(size) + self.kv_scale * self.model.beta_s * kv_tokens

    def alpha_s(self, size: int) -> float:
        """Return the seconds that one more request costs at this batch size."""
        return self.batch_scale * self.model.segment_at(size).alpha_s

    @property
    def beta_s(self) -> float:
        return self.kv_scale * self.model.beta_s

    def observe(self, size: int, kv_tokens: int, measured_s: float) -> None:
        """Learn from one measured step."""
        predicted_s = self.seconds(size, kv_tokens)
        if predicted_s <= 0 or measured_s <= 0:
            return
        error = self.note_ratio(measured_s / predicted_s)
        batch_share = self.batch_scale * self.batch_s(size) / predicted_s
        kv_share = 1.0 - batch_share
        step = self.LEARNING_RATE * error / (batch_share**2 + kv_share**2)
        self.rescale(batch=step * batch_share, kv=step * kv_share)

    def rescale(self, *, batch: float, kv: float) -> None:
        """Raise the scales by these shares of themselves."""
        self.batch_scale *= 1.0 + batch
        self.kv_scale *= 1.0 + kv

    def note_ratio(self, ratio: float) -> float:
        """Count a step's measured / predicted time among those of ``error``. Return the error to learn from."""
        self._ratios.append(ratio)
        error, limit = ratio - 1.0, self.OUTLIER * self._median_error
        factor = self._MEDIAN_STEP if abs(error) > self._median_error else 1 / self._MEDIAN_STEP
        self._median_error = min(
            self.MAX_ERROR / self.OUTLIER, max(self._LEAST_MEDIAN, factor * self._median_error)
        )
        return max(-limit, min(limit, error))

    def error(self) -> PredictionError:
        return PredictionError.of(self._ratios)


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseWork:
    """What a step of one phase computes, as the estimators see it."""

    phase: Phase
    size: int
    """Requests in decode, tokens in prefill."""
    kv_tokens: int
    """Σ L_i in decode, (token, attended token) pairs in prefill."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedWork:
    """What a step computes that decodes and computes prompt tokens."""

    num_decodes: int
    kv_tokens: int
    """Σ L_i of the decodes."""
    prompt_tokens: int
    token_pairs: int
    """(token, attended token) pairs of the prompt tokens."""

    @property
    def phase(self) -> Phase:
        return Phase.MIXED


Work = PhaseWork | MixedWork


class MixedEstimator:
    """One stage's time of a mixed step: ``step_times.mixed_step_s`` with the scales of its two estimators.

    Of its own it has the calibration's factors, by the decodes' share of the tokens. A measured mixed step rescales
    both estimators by the same method as a step of one kind does, each term by its share of the prediction. The
    decode estimator counts the step's error.
    """

    def __init__(
        self, decode: OnlineEstimator, prefill: OnlineEstimator, scales: tuple[float, ...] = (1.0,)
    ) -> None:
        self._decode = decode
        self._prefill = prefill
        self._scales = scales

    def seconds(self, work: MixedWork) -> float:
        return sum(self._terms_s(work))

    def observe(self, work: MixedWork, measured_s: float) -> None:
        """Learn from one measured step."""
        terms_s = self._terms_s(work)
        predicted_s = sum(terms_s)
        if predicted_s <= 0 or measured_s <= 0:
            return
        error = self._decode.note_ratio(measured_s / predicted_s)
        shares = [term_s / predicted_s for term_s in terms_s]
        step = OnlineEstimator.LEARNING_RATE * error / sum(share**2 for share in shares)
        self._decode.rescale(batch=step * shares[0], kv=step * shares[1])
        self._prefill.rescale(batch=step * shares[2], kv=step * shares[3])

    def _terms_s(self, work: MixedWork) -> tuple[float, float, float, float]:
        """Return the seconds of the decodes and of their attention, then of the prompt tokens and of theirs."""
        decode, prefill = self._decode, self._prefill
        scale = mixed_scale(self._scales, work.num_decodes, work.prompt_tokens)
        return (
            decode.batch_scale * decode.batch_s(work.num_decodes),
            decode.beta_s * work.kv_tokens,
            scale * prefill.batch_scale * prefill.added_batch_s(work.num_decodes, work.prompt_tokens),
            scale * prefill.beta_s * work.token_pairs,
        )


class FilledEstimator:
    """One stage's time of a decode batch's step that prompt tokens fill up to a number of tokens.

    The attention of the prompts is left out: it is the same whichever batch they fill up.
    """

    def __init__(
        self,
        decode: OnlineEstimator,
        prefill: OnlineEstimator,
        step_tokens: int,
        scales: tuple[float, ...] = (1.0,),
    ) -> None:
        self._decode = decode
        self._prefill = prefill
        self._scales = scales
        self._step_tokens = step_tokens

    def seconds(self, size: int, kv_tokens: int) -> float:
        prompt_tokens = max(0, self._step_tokens - size)
        scale = mixed_scale(self._scales, size, prompt_tokens)
        added_s = self._prefill.batch_scale * self._prefill.added_batch_s(size, prompt_tokens)
        return self._decode.seconds(size, kv_tokens) + scale * added_s

    def alpha_s(self, size: int) -> float:
        """Return the seconds that one more request costs in the place of a prompt token, if there is one."""
        if size >= self._step_tokens:
            return self._decode.alpha_s(size)
        scale = mixed_scale(self._scales, size, self._step_tokens - size)
        return self._decode.alpha_s(size) - scale * self._prefill.alpha_s(size)

    @property
    def beta_s(self) -> float:
        return self._decode.beta_s


class BandwidthEstimator:
    """One stage's host → GPU rate while it computes, in bytes per second; it follows the measurements."""

    LEARNING_RATE = 0.05

    def __init__(self, bytes_per_s: float) -> None:
        self.bytes_per_s = bytes_per_s

    def observe(self, num_bytes: int, seconds: float) -> None:
        if seconds > 0:
            self.bytes_per_s += self.LEARNING_RATE * (num_bytes / seconds - self.bytes_per_s)
