"""Prompt and output lengths: drawn from distributions fitted to given means and medians.

Draws are stratified (one per quantile, then shuffled), so a few hundred requests already meet the figures. The cut at
the model's context is part of the fit: the lengths drawn have the mean and median asked for. This module knows only
lengths, no text.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from pipemax.domain.workload import LengthStatistics, WorkloadSpec

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

_MIXTURE_SHORT_SHARE = 0.65
_MIXTURE_SHORT_SIGMA = 0.87
_MIXTURE_LONG_SIGMA = 0.5
_GRID = np.linspace(-8.0, 8.0, 8001)
_GRID_CDF = np.array([NormalDist().cdf(z) for z in _GRID])
_BISECTIONS = 26
_TOLERANCE = 0.03
_FEWEST_TO_CHECK = 200


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Workload:
    """Requests in order of arrival; all are there at the start."""

    name: str
    prompt_tokens: Ints
    """Prompt lengths, the shared prefix included."""
    output_tokens: Ints
    """Output lengths, at least 1 each."""
    shared_prefix_tokens: int = 0

    def __post_init__(self) -> None:
        if len(self.prompt_tokens) != len(self.output_tokens) or len(self.prompt_tokens) == 0:
            raise ValueError("a workload needs as many outputs as prompts, and at least one")
        if self.prompt_tokens.min() <= self.shared_prefix_tokens or self.output_tokens.min() < 1:
            raise ValueError("every prompt must exceed the shared prefix, and every output have a token")

    def __len__(self) -> int:
        return len(self.prompt_tokens)

    @property
    def total_tokens(self) -> int:
        return int(self.prompt_tokens.sum() + self.output_tokens.sum())

    @property
    def tokens_per_row(self) -> float:
        """The mean of prompt and output together."""
        return self.total_tokens / len(self)

    @property
    def typical_output_tokens(self) -> int:
        """The mean output length, rounded: all that PipeMax's controller is told of the outputs."""
        return round(float(self.output_tokens.mean()))

    def first(self, num_requests: int) -> "Workload":
        """Return the first requests, or all if there are fewer."""
        return replace(
            self,
            prompt_tokens=self.prompt_tokens[:num_requests],
            output_tokens=self.output_tokens[:num_requests],
        )


def grain_of(workload: Workload, block_tokens: int, *, enough_outputs: int) -> int:
    """Return the tokens of a grain that leave outputs this long on average: a power of 2 that divides a block."""
    grain = 1
    while (
        block_tokens % (2 * grain) == 0 and float(workload.output_tokens.mean()) >= 2 * grain * enough_outputs
    ):
        grain *= 2
    return grain


def in_grains(workload: Workload, grain: int) -> Workload:
    """Return the rows with one token for each ``grain`` tokens, for a machine whose tokens have the KV of as many.

    Such a row holds as much KV as the row itself, and its steps take as long, but it ends after fewer of them. So
    batches, copies and tokens/s are those of the table, and the simulation takes a fraction of the time. It has too
    much to store on the host in a step, by the grain, and too little attention to prompts.
    """
    if grain == 1:
        return workload

    def coarse(lengths: Ints) -> Ints:
        return np.asarray(np.maximum(1, np.rint(lengths / grain)), dtype=np.int64)

    prompts = coarse(workload.prompt_tokens)
    return replace(
        workload,
        prompt_tokens=prompts,
        output_tokens=coarse(workload.output_tokens),
        shared_prefix_tokens=min(workload.shared_prefix_tokens // grain, int(prompts.min()) - 1),
    )


def draw_workload(spec: WorkloadSpec, num_requests: int, rng: np.random.Generator) -> Workload:
    """Draw ``num_requests`` requests with the means and medians of ``spec``."""
    if num_requests < 1:
        raise ValueError(f"a workload needs at least one request, not {num_requests}")
    prompts = np.rint(_solve(spec.prompt, _quantiles(num_requests, rng), spec.prompt.most)).astype(np.int64)
    return Workload(
        name=spec.name,
        prompt_tokens=prompts,
        output_tokens=draw_outputs(spec.output, spec.context_tokens - prompts, rng),
        shared_prefix_tokens=spec.shared_prefix_tokens,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledRows:
    """Rows by the lengths of some of a table's prompts, and of outputs or their statistics."""

    prompt_tokens: tuple[int, ...]
    outputs: tuple[int, ...] | LengthStatistics

    def draw(self, num_requests: int, rng: np.random.Generator) -> Workload:
        """Draw prompts and outputs, each by itself; more than were sampled are drawn again."""
        prompts = _resampled(self.prompt_tokens, num_requests, rng)
        if isinstance(self.outputs, LengthStatistics):
            outputs = draw_outputs(self.outputs, np.full(num_requests, self.outputs.most), rng)
        else:
            outputs = _resampled(self.outputs, num_requests, rng)
        return Workload(name="sampled rows", prompt_tokens=prompts, output_tokens=outputs)


def _resampled(lengths: tuple[int, ...], count: int, rng: np.random.Generator) -> Ints:
    return rng.choice(np.array(lengths, dtype=np.int64), count, replace=count > len(lengths))


def draw_outputs(statistics: LengthStatistics, most_tokens: Ints, rng: np.random.Generator) -> Ints:
    """Draw an output length for each entry of ``most_tokens``, which is the longest that it may be."""
    lengths = _solve(statistics, _quantiles(len(most_tokens), rng), most_tokens)
    return np.asarray(np.maximum(1, np.rint(lengths)), dtype=np.int64)


def _quantiles(count: int, rng: np.random.Generator) -> Floats:
    """Draw one quantile in each of ``count`` equal strata, and shuffle them."""
    return np.asarray((rng.permutation(count) + rng.random(count)) / count, dtype=np.float64)


def _solve(target: LengthStatistics, quantiles: Floats, limits: int | Ints) -> Floats:
    """Return lengths that have the target's mean and median once cut at ``limits``.

    Bisects a family's location for the median, within a bisection of its other parameter for the mean.
    """

    def lengths_for(other: float) -> Floats:
        low, high = _location_range(target)
        for _ in range(_BISECTIONS):
            location = (low + high) / 2
            if np.median(cut(location, other)) < target.median:
                low = location
            else:
                high = location
        return cut((low + high) / 2, other)

    def cut(location: float, other: float) -> Floats:
        return np.minimum(_FAMILIES[target.family](target, quantiles, location, other), limits)

    low, high = _other_range(target)
    for _ in range(_BISECTIONS):
        other = (low + high) / 2
        mean_too_low = lengths_for(other).mean() < target.mean
        # A wider truncated normal leans further to its far bound, so its mean falls while the median is held.
        if mean_too_low == (target.family != "normal" or target.median < (target.least + target.most) / 2):
            low = other
        else:
            high = other
    lengths = lengths_for((low + high) / 2)
    for name, got, wanted in (
        ("mean", lengths.mean(), target.mean),
        ("median", np.median(lengths), target.median),
    ):
        if len(lengths) >= _FEWEST_TO_CHECK and abs(got - wanted) > _TOLERANCE * wanted:
            raise ValueError(
                f"no {target.family} lengths within [{target.least}, {target.most}] have mean {target.mean} and "
                f"median {target.median}: the nearest {name} is {got:.1f}"
            )
    return lengths


def _location_range(target: LengthStatistics) -> tuple[float, float]:
    span = target.most - target.least
    if target.family == "normal":
        return target.least - 2.0 * span, target.most + 2.0 * span
    return math.log(target.least) - 4.0, math.log(target.most) + 4.0


def _other_range(target: LengthStatistics) -> tuple[float, float]:
    match target.family:
        case "normal":
            return 1e-3 * target.median, float(target.most - target.least)
        case "lognormal":
            return 1e-3, 4.0
        case _:
            return math.log(target.median), math.log(target.most) + 2.0


def _truncated(quantiles: Floats, low_z: float, high_z: float) -> Floats:
    """Return standard normal values within [low_z, high_z], by quantile."""
    low, high = np.interp([low_z, high_z], _GRID, _GRID_CDF)
    return np.asarray(np.interp(low + quantiles * (high - low), _GRID_CDF, _GRID), dtype=np.float64)


def _lognormal(target: LengthStatistics, quantiles: Floats, location: float, other: float) -> Floats:
    bounds = [(math.log(bound) - location) / other for bound in (target.least, target.most)]
    return np.clip(np.exp(location + other * _truncated(quantiles, *bounds)), target.least, target.most)


def _normal(target: LengthStatistics, quantiles: Floats, location: float, other: float) -> Floats:
    bounds = [(bound - location) / other for bound in (target.least, target.most)]
    return np.clip(location + other * _truncated(quantiles, *bounds), target.least, target.most)


def _mixture(target: LengthStatistics, quantiles: Floats, location: float, other: float) -> Floats:
    is_short = quantiles < _MIXTURE_SHORT_SHARE
    within = np.where(
        is_short,
        quantiles / _MIXTURE_SHORT_SHARE,
        (quantiles - _MIXTURE_SHORT_SHARE) / (1 - _MIXTURE_SHORT_SHARE),
    )
    z = np.interp(within, _GRID_CDF, _GRID)
    short = np.exp(location + _MIXTURE_SHORT_SIGMA * z)
    long = np.exp(other + _MIXTURE_LONG_SIGMA * z)
    return np.clip(np.where(is_short, short, long), target.least, target.most)


_FAMILIES: dict[str, Callable[[LengthStatistics, Floats, float, float], Floats]] = {
    "lognormal": _lognormal,
    "normal": _normal,
    "mixture": _mixture,
}
