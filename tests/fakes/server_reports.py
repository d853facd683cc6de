"""Reports as engine servers send them to the driver."""

from typing import Any

from pipemax.wire import JobOutlook, JobStats, ServerStats
from pipemax_spark.report.collector import Collector


def server_report(
    server_id: str, *, at_s: float = 0.0, job: JobStats, state: str = "ready", **fields: Any
) -> ServerStats:
    """Return a report on ``job``, by its sender's clock; ``fields`` are others of ``ServerStats``."""
    return ServerStats(
        server_id=server_id, host="h", pid=1, at_unix_s=at_s, state=state, jobs={"job": job}, **fields
    )


def outlook_after(collector: Collector, stats: ServerStats) -> JobOutlook | None:
    """Give the collector a report as its socket does; return what its sender is answered."""
    return collector._answer(stats)
