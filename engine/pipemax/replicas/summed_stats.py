"""Add up the statistics of replicas.

Counts of work and of memory are sums; rates, shares, times and flags are means. What a replica had counted before it
died stays counted.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from pipemax.engine import EngineStats
from pipemax.policy.compare import ChosenPolicy, PolicyChoice

_COUNTS = frozenset(
    {
        *("preemptions", "output_steps", "output_tokens", "prefill_steps", "decode_steps", "empty_steps"),
        *(
            "decoded_tokens",
            "evictions",
            "overwrites",
            "recomputes",
            "prefetches",
            "prefetched_blocks",
            "found_blocks",
        ),
        *("refused", "phase_switches", "prefetched_bytes", "loaded_bytes", "stored_bytes"),
        *("known_requests", "schedule_s", "prefetch_stall_s", "prefix_cache_hit_tokens"),
        "drain_at_full_rate_s",
    }
)
"""Figures that only grow in an engine's life, besides its account of time."""
_ACCOUNT_BEGINS = "time_"
_MEANS_END = ("_s", "_rate", "_usage", "_percent", "_error", "_per_request")
_MEANS_BEGIN = ("is_", "awaits_")


def carried_counts(carried: Mapping[str, float], last: Mapping[str, float]) -> dict[str, float]:
    """Return the counts of all lives of a replica, whose last one has ended with ``last``."""
    return {
        name: carried.get(name, 0.0) + last.get(name, 0.0)
        for name in {*carried, *last}
        if name in _COUNTS or name.startswith(_ACCOUNT_BEGINS)
    }


def with_carried(metrics: Mapping[str, float], carried: Mapping[str, float]) -> dict[str, float]:
    """Return a replica's figures with the counts of its earlier lives."""
    return {**carried, **{name: value + carried.get(name, 0.0) for name, value in metrics.items()}}


def summed(stats: Sequence[EngineStats]) -> EngineStats:
    """Return the statistics of all replicas together. The policy is that of the first."""
    if not stats:
        return EngineStats()
    names = {name for one in stats for name in one.metrics}
    phases = {one.phase for one in stats} - {"idle"}
    return EngineStats(
        phase=("idle" if not phases else phases.pop() if len(phases) == 1 else "mixed"),
        running_requests=sum(one.running_requests for one in stats),
        waiting_requests=sum(one.waiting_requests for one in stats),
        kv_usage=sum(one.kv_usage for one in stats) / len(stats),
        metrics={name: _together(name, [one.metrics for one in stats]) for name in sorted(names)},
        policy=stats[0].policy,
    )


def choice_of_all(policy: dict[str, Any], count: int) -> PolicyChoice:
    """Return the choice of the first replica, as that of all: they have measured the same."""
    choice = PolicyChoice(**{**policy, "chosen": ChosenPolicy(policy["chosen"])})
    return replace(
        choice,
        reason=f"in each of {count} replicas: {choice.reason}",
        predicted_tokens_per_s={name: count * rate for name, rate in choice.predicted_tokens_per_s.items()},
    )


def _together(name: str, metrics: Sequence[Mapping[str, float]]) -> float:
    values = [of_replica[name] for of_replica in metrics if name in of_replica]
    if name.endswith(_MEANS_END) or name.startswith(_MEANS_BEGIN):
        if name == "kv_tokens_per_request":  # 0 before an engine has had requests
            values = [value for value in values if value > 0] or [0.0]
        return sum(values) / len(values)
    return sum(values)
