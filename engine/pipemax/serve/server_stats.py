"""Take the server's statistics at one instant: its engine, window, sessions and jobs, as ``wire.ServerStats``."""

import socket
import time
from dataclasses import replace

from pipemax.serve.engine_host import EngineHost
from pipemax.serve.flow.credit import CreditWindow
from pipemax.serve.job_stats import StatsBook
from pipemax.serve.sessions import EngineSessions
from pipemax.wire import LENGTH_CORRELATION, CollectorAddress, ProcessIdentity, ServerStats


class ServerSnapshots:
    """Takes snapshots of the server's statistics. Thread-safe."""

    def __init__(
        self, host: EngineHost, window: CreditWindow, jobs: StatsBook, sessions: EngineSessions
    ) -> None:
        self._host = host
        self._window = window
        self._jobs = jobs
        self._sessions = sessions
        self._identity = ProcessIdentity.of_this_process()
        self._host_name = socket.gethostname()

    def with_all_jobs(self) -> ServerStats:
        return replace(self.without_jobs(), jobs=self._jobs.jobs())

    def with_jobs_of(self, collector: CollectorAddress) -> ServerStats:
        """Return the statistics with only the jobs that report to this collector."""
        return replace(self.without_jobs(), jobs=self._jobs.jobs(collector))

    def without_jobs(self) -> ServerStats:
        """Return the statistics of the server, its engine and its window."""
        host = self._host.snapshot()
        engine = host.engine_stats
        correlation = self._sessions.lengths.correlation()
        learned = {} if correlation is None else {LENGTH_CORRELATION: correlation}
        return ServerStats(
            server_id=f"{self._host_name}:{self._identity.pid}:{self._identity.start_ticks}",
            host=self._host_name,
            pid=self._identity.pid,
            at_unix_s=time.time(),
            state=host.state,
            detail=host.detail,
            engine_id=host.engine_id,
            engine_starts=host.engine_starts,
            phase=engine.phase,
            running_requests=engine.running_requests,
            waiting_requests=engine.waiting_requests,
            open_sessions=self._sessions.num_open,
            kv_usage=engine.kv_usage,
            window_rows=self._window.rows if host.state == "ready" else 0,
            engine_metrics={**engine.metrics, **learned},
            policy=engine.policy,
            replicas=list(engine.replicas),
            gpus=list(host.gpus),
            machine_fault=host.machine_fault,
        )
