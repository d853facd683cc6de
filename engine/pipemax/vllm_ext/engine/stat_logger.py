"""Turn vLLM's statistics of each step into ours: figures by name, and an account of where the time went.

Works for both policies. The counts of PipeMax's scheduler come in the place of the KV connector's statistics. Stock
vLLM gives only its own, so a step that mixes both phases is split by its tokens.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from vllm.v1.metrics.loggers import StatLoggerBase

from pipemax.engine import EngineStats
from pipemax.vllm_ext.engine.admission import AdmissionBook
from pipemax.vllm_ext.engine.time_account import TimeAccount, TimePart


@dataclass(slots=True)
class EngineLedger:
    """Written by the engine's thread, read by others. ``latest`` is replaced whole: a reader sees one instant."""

    time: TimeAccount
    admission: AdmissionBook | None = None
    """None until the engine can take requests."""
    max_num_seqs: int | None = None
    """The engine's real one; None until it can take requests."""
    input_open: bool = False
    latest: EngineStats = field(default_factory=EngineStats)

    def stats(self) -> EngineStats:
        """Return the statistics as of now.

        vLLM reports only after a step, so its last report before a pause still shows requests.
        """
        stats = self.latest
        if self.admission is not None and self.admission.is_empty:
            self.time.charge(time.monotonic(), {TimePart.WAITING_FOR_INPUT: 1.0})
            stats = EngineStats(metrics=stats.metrics)
        figures = self.time.figures()
        if self.max_num_seqs is not None:
            figures["max_num_seqs"] = float(self.max_num_seqs)
        return replace(stats, metrics=stats.metrics | figures)


class StatLogger(StatLoggerBase):
    """One engine's logger. vLLM calls ``record`` after each step, on the engine's thread."""

    def __init__(self, ledger: EngineLedger, clock: Callable[[], float] = time.monotonic) -> None:
        self._ledger = ledger
        self._clock = clock
        self._preemptions = 0
        self._prefix_queries = 0
        self._prefix_hits = 0
        self._stall_s = 0.0
        self._output_steps = 0
        self._output_tokens = 0

    def record(
        self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
    ) -> None:
        admission = self._ledger.admission
        if scheduler_stats is None or admission is None:  # what it runs to measure itself is its start
            return
        prompt_tokens = output_tokens = 0
        if iteration_stats is not None:
            self._preemptions += iteration_stats.num_preempted_reqs
            prompt_tokens = iteration_stats.num_prompt_tokens
            output_tokens = iteration_stats.num_generation_tokens
        self._output_steps += output_tokens > 0
        self._output_tokens += output_tokens
        self._prefix_queries += scheduler_stats.prefix_cache_stats.queries
        self._prefix_hits += scheduler_stats.prefix_cache_stats.hits
        counts: dict[str, float] = scheduler_stats.kv_connector_stats or {}
        if "parked_requests" not in counts:  # a user's own connector under stock vLLM
            counts = {}
        step_s = self._ledger.time.span_s(self._clock())
        waiting = scheduler_stats.num_waiting_reqs
        if counts:
            # What is parked fills batches up as well as what waits: vLLM counts it as running.
            decoding = self._decode_part(waiting + int(counts["parked_requests"]))
            by_tokens = self._vllm_shares(prompt_tokens, output_tokens, decoding)
            shares = self._pipemax_shares(counts, step_s, decoding, by_tokens)
            admission.report(
                demand_tokens=counts["admission_demand_tokens"],
                mean_tokens=counts["kv_tokens_per_request"],
                num_known=int(counts["known_requests"]),
            )
        else:
            shares = self._vllm_shares(prompt_tokens, output_tokens, self._decode_part(waiting))
        self._ledger.time.charge(self._clock(), shares, output_tokens=output_tokens)
        self._ledger.latest = EngineStats(
            phase=_phase(shares),
            running_requests=scheduler_stats.num_running_reqs,
            waiting_requests=waiting,
            kv_usage=scheduler_stats.kv_cache_usage,
            metrics={
                "preemptions": float(self._preemptions),
                "prefix_cache_hit_tokens": float(self._prefix_hits),
                "prefix_cache_hit_rate": self._prefix_hits / max(1, self._prefix_queries),
                "batch_size": float(output_tokens),
                "output_steps": float(self._output_steps),
                "output_tokens": float(self._output_tokens),
                "measured_step_s": step_s,
                **counts,
            },
        )

    def _pipemax_shares(
        self, counts: dict[str, float], step_s: float, decoding: TimePart, by_tokens: dict[TimePart, float]
    ) -> dict[TimePart, float]:
        stall_s = max(0.0, counts["prefetch_stall_s"] - self._stall_s)
        self._stall_s = counts["prefetch_stall_s"]
        if counts["awaits_input"]:
            return {TimePart.WAITING_FOR_INPUT: 1.0}
        is_mixed = counts.get("is_mixed_batching", 0.0)
        if not (counts["is_decode_phase"] or is_mixed):
            return {TimePart.PREFILL: 1.0}
        computing = by_tokens if is_mixed else {decoding: 1.0}
        total = sum(computing.values())
        stalled = min(1.0, stall_s / step_s) if step_s > 0 else 0.0
        shares = {part: (1.0 - stalled) * share / total for part, share in computing.items()}
        return {TimePart.PREFETCH_STALL: stalled, **shares}

    def _vllm_shares(
        self, prompt_tokens: int, output_tokens: int, decoding: TimePart
    ) -> dict[TimePart, float]:
        # The step that ends a prompt also gives an output token. A step without output computed a part of a prompt.
        if not output_tokens:
            return {TimePart.PREFILL: 1.0}
        return {TimePart.PREFILL: float(prompt_tokens), decoding: float(output_tokens)}

    def _decode_part(self, waiting: int) -> TimePart:
        is_draining = waiting == 0 and not self._ledger.input_open
        return TimePart.DRAIN if is_draining else TimePart.DECODE

    def log_engine_initialized(self) -> None:
        pass


def _phase(shares: dict[TimePart, float]) -> str:
    """Return ``prefill``, ``decode``, ``mixed``, or ``idle`` while the engine waits for input."""
    parts = {part for part, share in shares.items() if share > 0}
    if TimePart.WAITING_FOR_INPUT in parts:
        return "idle"
    if TimePart.PREFILL not in parts:
        return "decode"
    return "prefill" if len(parts) == 1 else "mixed"
