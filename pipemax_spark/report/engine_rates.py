"""What each engine and each replica did for one job, and what its machine failed of, from the servers' reports.

A slow GPU shows by its engine's rate. All servers that an executor has had on the same GPUs count as one engine.
Without GPUs each server counts as one.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipemax.wire import JobStats, ServerStats

_REPLICA_COUNTS = ("rows_done", "prompt_tokens", "completion_tokens", "restarts")


@dataclass(slots=True)
class _Life:
    """One server's work for the job."""

    host: str
    gpus: tuple[str, ...]
    since_unix_s: float
    until_unix_s: float
    """When it last reported more rows."""
    job: JobStats
    machine_fault: str = ""


class EngineRates:
    """One job's rates by engine. Not thread-safe: the owner lets in one thread at a time."""

    def __init__(self) -> None:
        self._lives: dict[str, _Life] = {}

    def add(self, stats: ServerStats, job: JobStats) -> None:
        """Take a report, of which ``job`` is this job's part."""
        life = self._lives.get(stats.server_id)
        if life is None:
            at_s = stats.at_unix_s
            life = self._lives[stats.server_id] = _Life(stats.host, tuple(stats.gpus), at_s, at_s, job)
        if not job.rows_received:  # it loads, or waits for another job
            life.since_unix_s = life.until_unix_s = stats.at_unix_s
        if job.rows_done > life.job.rows_done:
            life.job, life.until_unix_s = job, stats.at_unix_s
        life.machine_fault = stats.machine_fault or life.machine_fault

    def totals(self) -> list[dict[str, Any]]:
        """Return the engines by rate, the slowest first.

        ``host``, ``gpus``, ``rows_done``, ``completion_tokens``, ``tokens_per_s``, ``rows_per_s`` and
        ``machine_faults`` of each. A rate is 0 if the time that it took is not known.
        """
        engines: defaultdict[tuple[str, tuple[str, ...]], list[_Life]] = defaultdict(list)
        for server, life in self._lives.items():
            engines[life.host, life.gpus or (server,)].append(life)
        totals = [_totals(lives) for lives in engines.values()]
        return sorted(totals, key=lambda engine: (engine["tokens_per_s"], engine["rows_per_s"]))


class ReplicaTotals:
    """One job's counts by replica. Not thread-safe: the owner lets in one thread at a time.

    A replica's counts run since its first start, through all of its lives. What an engine that is older than the job
    had done when it was first heard of does not count.
    """

    def __init__(self) -> None:
        self._before: dict[tuple[str, int], Sequence[Mapping[str, Any]]] = {}
        self._since_unix_s: dict[tuple[str, int], float] = {}
        self._latest: dict[tuple[str, int], ServerStats] = {}

    def add(self, stats: ServerStats, job: JobStats) -> None:
        """Take a report, of which ``job`` is this job's part."""
        if not stats.replicas:
            return
        engine = (stats.server_id, stats.engine_starts)
        if engine not in self._latest:
            done = sum(replica["rows_done"] for replica in stats.replicas)
            self._before[engine] = () if done <= job.rows_received else stats.replicas
            self._since_unix_s[engine] = stats.at_unix_s
        self._latest[engine] = stats

    def totals(self) -> list[dict[str, Any]]:
        """Return ``host``, ``replica``, its ``gpus`` and last ``state``, and counts since the job began, for each.

        ``seconds`` is the time over which the counts were taken.
        """
        totals = []
        for engine, stats in self._latest.items():
            before = {replica["replica"]: replica for replica in self._before[engine]}
            for replica in stats.replicas:
                earlier = before.get(replica["replica"], {})
                counts = {name: replica[name] - earlier.get(name, 0) for name in _REPLICA_COUNTS}
                known = {
                    "host": stats.host,
                    "replica": replica["replica"],
                    "gpus": replica["gpus"],
                    "state": replica["state"],
                    "seconds": round(stats.at_unix_s - self._since_unix_s[engine], 3),
                }
                totals.append(known | counts)
        return totals


def _totals(lives: Sequence[_Life]) -> dict[str, Any]:
    rows_done = sum(life.job.rows_done for life in lives)
    tokens = sum(life.job.completion_tokens for life in lives)
    seconds = sum(life.until_unix_s - life.since_unix_s for life in lives)
    return {
        "host": lives[0].host,
        "gpus": list(lives[0].gpus),
        "rows_done": rows_done,
        "completion_tokens": tokens,
        "tokens_per_s": round(tokens / seconds, 3) if seconds else 0.0,
        "rows_per_s": round(rows_done / seconds, 3) if seconds else 0.0,
        "machine_faults": [life.machine_fault for life in lives if life.machine_fault],
    }


def describe_engine(engine: Mapping[str, Any]) -> str:
    """Describe how fast an engine was, given as by ``EngineRates.totals``."""
    faults = engine["machine_faults"]
    parts = [
        f"{engine['tokens_per_s']:,.0f} generated tokens/s",
        f"{engine['rows_per_s']:,.1f} rows/s",
        f"{engine['rows_done']:,} rows on {engine['host']}{_gpu_text(engine['gpus'])}",
    ]
    if faults:
        times = "once" if len(faults) == 1 else f"{len(faults)} times"
        parts.append(f"its machine failed {times}: {faults[-1]}")
    return ", ".join(parts)


def describe_replica(replica: Mapping[str, Any]) -> str:
    """Describe what a replica has done, given as by ``ReplicaTotals.totals``."""
    restarts, seconds = replica["restarts"], replica["seconds"]
    parts = [
        f"{replica['completion_tokens'] / seconds:,.0f} generated tokens/s" if seconds else "",
        f"{replica['rows_done']:,} rows",
        f"{replica['completion_tokens']:,} tokens generated",
        f"{restarts} restart{'' if restarts == 1 else 's'}" if restarts else "",
        "given up, for it died again and again" if replica["state"] == "given up" else "",
    ]
    return f"{', '.join(part for part in parts if part)} on {replica['host']}{_gpu_text(replica['gpus'])}"


def _gpu_text(gpus: list[str]) -> str:
    """Return the GPUs in words that follow a machine's name; empty without any."""
    return f", GPU {', '.join(gpus)}" if gpus else ""
