"""The part of a run before its drain: its rates, where the stages' time went, and what limits it.

Also a whole table's time from it. The module knows neither vLLM nor which scheduler ran.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from pipemax.sim.result import table_seconds

_SCHEDULER_LIMITS = 0.05
_IDLE_LIMITS = 0.25
_LINK_LIMITS = 0.8
_POOL_IS_FULL = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class KvSample:
    """How much KV there is at one moment of a run, as shares of the pools that hold it."""

    time_s: float
    gpu: float
    """Blocks of requests, over the GPUs' blocks."""
    host: float
    """The same of the host's blocks; 0 for a scheduler that keeps nothing there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SteadyPart:
    """Figures of one engine until most of its requests had finished; shares are of the stages' time."""

    seconds: float
    tokens: int
    """Outputs made, and prompts that had ended."""
    prompts: float
    """Share of time in steps of prompt tokens only."""
    decode: float
    """Share of time in steps that only decode."""
    mixed: float
    """Share of time in steps that do both."""
    mean_decode_batch: float
    """Requests that a step decodes, mean over the steps that decode any."""
    host_bubble: float
    """Share of time in which the first stage has no step because the scheduler works."""
    host_to_gpu: float
    """Share of time in which a GPU's link carries KV from the host."""

    @property
    def idle(self) -> float:
        """Share of time in which a stage computes nothing."""
        return max(0.0, 1.0 - self.prompts - self.decode - self.mixed)

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class TableForecast:
    """A whole table on a whole node."""

    tokens_per_s: float
    """Prompts and outputs of all engines, before the drain."""
    rows_per_s: float
    hours: float
    drain_s: float
    """The part of the hours in which the last requests end, as measured."""


def forecast_table(
    steady: SteadyPart,
    *,
    run_seconds: float,
    run_tokens: int,
    run_rows: int,
    table_rows: int,
    num_engines: int,
) -> TableForecast:
    """Extrapolate a run of ``run_rows`` rows on one engine to a table on ``num_engines``."""
    rate = steady.tokens_per_s * num_engines
    seconds = table_seconds(
        table_rows,
        num_engines,
        run_rows=run_rows,
        run_tokens=run_tokens,
        run_seconds=run_seconds,
        steady_tokens=steady.tokens,
        steady_seconds=steady.seconds,
    )
    return TableForecast(
        tokens_per_s=rate,
        rows_per_s=rate * run_rows / run_tokens,
        hours=seconds / 3600.0,
        drain_s=run_seconds - steady.seconds,
    )


def limiting_factor(steady: SteadyPart, kv: Sequence[KvSample]) -> str:
    """Return what limits the steady part, in one clause."""
    if steady.host_bubble >= _SCHEDULER_LIMITS:
        return f"the scheduler: the first stage waits for it {steady.host_bubble:.0%} of the time"
    if steady.idle >= _IDLE_LIMITS and steady.host_to_gpu >= _LINK_LIMITS:
        return (
            f"copies of KV from host memory: the links carry them {steady.host_to_gpu:.0%} of the time, and the stages "
            f"compute nothing for {steady.idle:.0%}"
        )
    if steady.idle >= _IDLE_LIMITS:
        return (
            f"stages that wait for each other: they compute nothing for {steady.idle:.0%} of the time, because steps "
            "take unequally long or too few requests are there"
        )
    memory = _full_pool([sample for sample in kv if sample.time_s <= steady.seconds])
    shares = {"prompts": steady.prompts, "decode": steady.decode, "mixed": steady.mixed}
    kind = max(shares, key=lambda name: shares[name])
    if kind == "prompts":
        return f"computing prompts, {steady.prompts:.0%} of the time"
    steps = "decode steps" if kind == "decode" else "steps that decode and take prompt tokens"
    return f"{steps}, {shares[kind]:.0%} of the time, in batches of {steady.mean_decode_batch:.0f} requests{memory}"


def _full_pool(kv: Sequence[KvSample]) -> str:
    if not kv:
        return ""
    gpu, host = median(sample.gpu for sample in kv), max(sample.host for sample in kv)
    if gpu >= _POOL_IS_FULL:
        return f", which the GPUs' memory limits ({gpu:.0%} of its KV blocks are in use)"
    if host >= _POOL_IS_FULL:
        return f", which the host's memory limits (up to {host:.0%} of its KV blocks are in use)"
    return (
        f"; no pool of KV is full ({gpu:.0%} of the GPUs' blocks are in use, up to {host:.0%} of the host's)"
    )
