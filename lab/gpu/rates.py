"""Turn samples of an engine's figures into the rates of a window: the part of a round that stands for a long job.

Pure: samples come in, figures go out. ``drive`` takes the samples.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

_SHORTEST_S = 0.2
"""Samples closer together than this are not compared: the counts come once a step."""
_FULL_SHARE = 0.9
"""Of the peak of live KV: from there on, the host pool is as full as it gets."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """An engine's figures at one moment."""

    at_s: float
    """Since the round began."""
    waiting_requests: int
    metrics: Mapping[str, float]
    core_cpu_s: float
    """CPU seconds so far of the engine core's process, with its workers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """What happened between two samples."""

    begin: Sample
    end: Sample

    @property
    def seconds(self) -> float:
        return self.end.at_s - self.begin.at_s

    def grown(self, metric: str) -> float:
        return self.end.metrics.get(metric, 0.0) - self.begin.metrics.get(metric, 0.0)

    @property
    def live_blocks(self) -> float:
        return self.end.metrics.get("live_blocks", 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowRates:
    """The figures of a window. What only PipeMax has is None under stock vLLM."""

    window: str
    seconds: float
    output_tokens_per_s: float
    """First tokens of prompts included."""
    mean_batch: float | None
    """Decodes a step."""
    step_ms: float | None
    core_cpu_ms_per_step: float | None
    preemptions: float
    live_pools: float | None
    """Live KV, on the GPU or on the host, in sizes of the GPU's pool."""
    live_pools_per_s: float | None
    """How fast live KV grows; while it does, PipeMax computes more prompts than outputs end."""
    stall_share: float | None
    """Of the time: waiting for prefetches."""
    h2d_gb_per_s: float | None
    evictions_per_step: float | None
    share_within_5_percent: float | None
    """Of the steps, those of which the estimator was off by at most 5 %."""


def intervals(samples: Sequence[Sample]) -> list[Interval]:
    """Return what lies between neighbouring samples."""
    return [Interval(begin=a, end=b) for a, b in pairwise(samples) if b.at_s - a.at_s >= _SHORTEST_S]


def steady_stock(samples: Sequence[Sample], *, settle_s: float, needs_waiting: bool) -> list[Interval]:
    """Return stock vLLM's intervals after ``settle_s``, while rows wait if ``needs_waiting``."""
    return [
        each
        for each in intervals(samples)
        if each.begin.at_s >= settle_s and (each.end.waiting_requests > 0 or not needs_waiting)
    ]


def steady_pipemax(samples: Sequence[Sample], *, settle_s: float) -> list[Interval]:
    """Return PipeMax's intervals after ``settle_s`` in which live KV is near its peak, prompts included."""
    chosen = intervals(samples)
    peak = max((each.live_blocks for each in chosen), default=0.0)
    return [
        each
        for each in chosen
        if each.begin.at_s >= settle_s and each.live_blocks >= _FULL_SHARE * peak > 0.0
    ]


def decode_only(samples: Sequence[Sample], *, gpu_blocks: int) -> list[Interval]:
    """Return PipeMax's intervals without prompts in which live KV is more than the GPU's pool, by a fifth."""
    return [
        each
        for each in intervals(samples)
        if each.live_blocks >= 1.2 * gpu_blocks
        and not each.grown("prefill_steps")
        and each.grown("decode_steps") > 0
    ]


def window_rates(window: str, chosen: Sequence[Interval], *, gpu_blocks: int) -> WindowRates | None:
    """Return the figures of a window; None if it is empty."""
    if not chosen:
        return None

    def total(metric: str) -> float:
        return sum(each.grown(metric) for each in chosen)

    seconds = sum(each.seconds for each in chosen)
    is_pipemax = total("decode_steps") > 0
    steps = total("decode_steps") if is_pipemax else total("output_steps")
    decodes = total("decoded_tokens") if is_pipemax else total("output_tokens")
    core_cpu_s = sum(each.end.core_cpu_s - each.begin.core_cpu_s for each in chosen)

    def if_pipemax(figure: float) -> float | None:
        return round(figure, 4) if is_pipemax else None

    def per_step(figure: float) -> float | None:
        return round(figure / steps, 3) if steps else None

    within = sum(each.end.metrics.get("steps_within_5_percent", 0.0) for each in chosen) / len(chosen)
    return WindowRates(
        window=window,
        seconds=round(seconds, 1),
        output_tokens_per_s=round(total("output_tokens") / seconds, 1),
        mean_batch=per_step(decodes),
        step_ms=per_step(1e3 * seconds),
        core_cpu_ms_per_step=per_step(1e3 * core_cpu_s),
        preemptions=total("preemptions"),
        live_pools=if_pipemax(sum(each.live_blocks for each in chosen) / len(chosen) / gpu_blocks),
        live_pools_per_s=if_pipemax(total("live_blocks") / gpu_blocks / seconds),
        stall_share=if_pipemax(total("prefetch_stall_s") / seconds),
        h2d_gb_per_s=if_pipemax(total("loaded_bytes") / seconds / 1e9),
        evictions_per_step=per_step(total("evictions")) if is_pipemax else None,
        share_within_5_percent=if_pipemax(within),
    )
