"""What each replica of the engines has done for one job, from the servers' reports.

A replica's counts run since its first start, through all of its lives. What an engine that is older than the job had
done when it was first heard of does not count.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from pipemax.wire import JobStats, ServerStats
from pipemax_spark.report.engine_rates import gpu_text

_COUNTS = ("rows_done", "prompt_tokens", "completion_tokens", "restarts")


class ReplicaTotals:
    """One job's counts by replica. Not thread-safe: the owner lets in one thread at a time."""

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
                counts = {name: replica[name] - earlier.get(name, 0) for name in _COUNTS}
                known = {
                    "host": stats.host,
                    "replica": replica["replica"],
                    "gpus": replica["gpus"],
                    "state": replica["state"],
                    "seconds": round(stats.at_unix_s - self._since_unix_s[engine], 3),
                }
                totals.append(known | counts)
        return totals


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
    return f"{', '.join(part for part in parts if part)} on {replica['host']}{gpu_text(replica['gpus'])}"
