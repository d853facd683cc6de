"""The result of a simulation: one system's figures, and the recording behind the plots."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from pipemax.sim.event_queue import EventQueue
from pipemax.sim.links import CopySpan, Direction, Links
from pipemax.sim.pipeline import StageSpan
from pipemax.sim.workloads import Workload

STEADY_SHARE = 0.9
FIRST_LOOK = 0.1
"""Share of the rows after which a run may end because its rate is too low.

From there on a rate falls: at first the prompts of rows count whose outputs come later. 2026-11-27, lab/log.md: in 130
runs of mixed steps the steady rate was at most 1.0001 times any rate after the first tenth.
"""


@dataclass(slots=True, kw_only=True)
class Usage:
    """The work that a machine has done so far."""

    busy_gpu_s: float = 0.0
    """Seconds of computing, reading or reducing, summed over the GPUs."""
    decode_gpu_s: float = 0.0
    """Seconds of that in steps without prompts."""
    all_reduce_gpu_s: float = 0.0
    stalled_gpu_s: float = 0.0
    """Seconds in which steps that had arrived waited for copies, summed over the GPUs."""
    decode_steps: int = 0
    decode_requests: int = 0
    """Summed over the decode steps."""
    tokens_done: int = 0
    """Prompt and output tokens, less those that a preemption discarded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeSample:
    """One decode step as the last stage ended it, for the plots over time."""

    time_s: float
    step_s: float
    """Seconds on the slowest stage."""
    batch: int
    kv_tokens: int
    prefetched_tokens: int
    """Copied to the GPU while the step ran, for the steps after it; 0 in systems without prefetch."""


@dataclass(slots=True, kw_only=True)
class Recording:
    """The details of a run behind its figures; spans only if asked for."""

    keep_spans: bool = False
    stage_spans: list[StageSpan] = field(default_factory=list)
    copy_spans: list[CopySpan] = field(default_factory=list)
    decode_samples: list[DecodeSample] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationResult:
    """One system's figures. Rates are over the whole run, drain included, unless they say otherwise."""

    system: str
    seconds: float
    num_requests: int
    prompt_tokens: int
    output_tokens: int
    total_tokens_per_s: float
    """Prompts and outputs; a prompt computed twice counts once."""
    output_tokens_per_s: float
    steady_tokens_per_s: float
    """Tokens computed per second until STEADY_SHARE of the requests had finished, that is, without the drain."""
    steady_seconds: float
    """The time until then."""
    fell_below: bool
    """Whether the run ended early because its rate had fallen below ``Scenario.stops_below``: it would be lower yet."""
    mean_decode_batch: float
    bubble_fraction: float
    """Share of GPU time in which nothing is computed, read or reduced."""
    stall_fraction: float
    """Share of GPU time in which a step that had arrived waited for its copies; a part of the bubbles."""
    decode_fraction: float
    """Share of GPU time busy with steps that have no prompts in them."""
    all_reduce_fraction: float
    """Share of GPU time in collectives."""
    h2d_fraction: float
    """Share of time in which the host → GPU copy engines work, mean over the GPUs."""
    h2d_bytes: float
    recomputed_tokens: int
    gpu_kv_tokens: int
    """KV tokens that the GPUs hold together in decode."""
    recording: Recording


class Progress:
    """Tracks which requests are done. Each system reports to it; it raises if one is lost or ends twice."""

    def __init__(
        self,
        workload: Workload,
        queue: EventQueue,
        usages: Sequence[Usage],
        *,
        stops_at_drain: bool = False,
        stops_below: float = 0.0,
    ) -> None:
        self._queue = queue
        self._stops_at_drain = stops_at_drain
        self._stops_below = stops_below
        self.has_stopped = False
        """Whether the run ended at its drain, or because it was too slow."""
        self.fell_below = False
        self._usages = usages
        self._unfinished = set(range(len(workload)))
        self._num_requests = len(workload)
        self._drain_at = len(workload) - int(STEADY_SHARE * len(workload))
        self._first_look_at = len(workload) - int(FIRST_LOOK * len(workload))
        self.steady_tokens_per_s = 0.0
        self.steady_seconds = 0.0

    @property
    def num_finished(self) -> int:
        return self._num_requests - len(self._unfinished)

    @property
    def all_done(self) -> bool:
        return not self._unfinished

    @property
    def _tokens_per_s(self) -> float:
        return sum(usage.tokens_done for usage in self._usages) / self._queue.now_s()

    def finish(self, request: int) -> None:
        assert request in self._unfinished, f"request {request} finished twice"
        self._unfinished.remove(request)
        num_left = len(self._unfinished)
        if num_left == self._drain_at and self._queue.now_s() > 0:
            self._note_steady_rate()
            if self._stops_at_drain:
                self._stop()
        elif self._stops_below and self._drain_at < num_left <= self._first_look_at and not self.has_stopped:
            self.fell_below = self._tokens_per_s < self._stops_below
            if self.fell_below:
                self._note_steady_rate()
                self._stop()

    def _note_steady_rate(self) -> None:
        self.steady_seconds = self._queue.now_s()
        self.steady_tokens_per_s = self._tokens_per_s

    def _stop(self) -> None:
        self.has_stopped = True
        self._queue.stop()

    def require_all_done(self) -> None:
        if self._unfinished and not self.has_stopped:
            raise AssertionError(
                f"{len(self._unfinished)} requests never finished, among them {sorted(self._unfinished)[:5]}"
            )


def table_seconds(
    table_rows: int,
    num_engines: int,
    *,
    run_rows: int,
    run_tokens: float,
    run_seconds: float,
    steady_tokens: float,
    steady_seconds: float,
) -> float:
    """Extrapolate one engine's run to a table on ``num_engines``, and return its seconds.

    The bulk runs at the steady rate; the drain of the run is added once, since every engine has one at its end.
    """
    drain_tokens = num_engines * (run_tokens - steady_tokens)
    bulk_tokens = max(0.0, table_rows * run_tokens / run_rows - drain_tokens)
    return bulk_tokens * steady_seconds / (steady_tokens * num_engines) + run_seconds - steady_seconds


def summarize(
    system: str,
    workload: Workload,
    usages: Sequence[Usage],
    links: Links,
    progress: Progress,
    recording: Recording,
    *,
    num_gpus: int,
    gpu_kv_tokens: int,
    seconds: float,
    recomputed_tokens: int = 0,
) -> SimulationResult:
    """Summarize a run that ended after ``seconds``; ``usages`` are those of all machines that took part in it.

    Raise ``AssertionError`` unless each token was counted as done exactly once.
    """
    progress.require_all_done()
    tokens_done = sum(usage.tokens_done for usage in usages)
    if tokens_done != workload.total_tokens and not progress.has_stopped:
        raise AssertionError(f"{system} counted {tokens_done:,} tokens as done of {workload.total_tokens:,}")
    gpu_s = num_gpus * seconds
    steps = sum(usage.decode_steps for usage in usages)
    output_tokens = int(workload.output_tokens.sum())
    return SimulationResult(
        system=system,
        seconds=seconds,
        num_requests=len(workload),
        prompt_tokens=int(workload.prompt_tokens.sum()),
        output_tokens=output_tokens,
        total_tokens_per_s=tokens_done / seconds,
        output_tokens_per_s=output_tokens / seconds,
        steady_tokens_per_s=progress.steady_tokens_per_s,
        steady_seconds=progress.steady_seconds,
        fell_below=progress.fell_below,
        mean_decode_batch=sum(usage.decode_requests for usage in usages) / steps if steps else 0.0,
        bubble_fraction=1 - sum(usage.busy_gpu_s for usage in usages) / gpu_s,
        stall_fraction=sum(usage.stalled_gpu_s for usage in usages) / gpu_s,
        decode_fraction=sum(usage.decode_gpu_s for usage in usages) / gpu_s,
        all_reduce_fraction=sum(usage.all_reduce_gpu_s for usage in usages) / gpu_s,
        h2d_fraction=links.busy_s(Direction.HOST_TO_GPU) / gpu_s,
        h2d_bytes=links.copied_bytes(Direction.HOST_TO_GPU),
        recomputed_tokens=recomputed_tokens,
        gpu_kv_tokens=gpu_kv_tokens,
        recording=recording,
    )
