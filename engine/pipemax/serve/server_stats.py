"""Take the server's statistics at one instant: its engine, window, sessions and jobs, as ``wire.ServerStats``."""

import socket
import time

from pipemax.serve.engine_host import EngineHost
from pipemax.serve.flow.credit import CreditWindow
from pipemax.serve.sessions import EngineSessions
from pipemax.wire import LENGTH_CORRELATION, JobStats, ProcessIdentity, ServerStats


def server_stats(
    host: EngineHost, window: CreditWindow, sessions: EngineSessions, jobs: dict[str, JobStats]
) -> ServerStats:
    """Return the statistics of the server, its engine and its window, with those of these jobs."""
    identity, host_name = ProcessIdentity.own(), socket.gethostname()
    snapshot = host.snapshot()
    engine = snapshot.engine_stats
    correlation = sessions.lengths.correlation()
    learned = {} if correlation is None else {LENGTH_CORRELATION: correlation}
    return ServerStats(
        server_id=f"{host_name}:{identity.pid}:{identity.start_ticks}",
        host=host_name,
        pid=identity.pid,
        at_unix_s=time.time(),
        state=snapshot.state,
        detail=snapshot.detail,
        engine_id=snapshot.engine_id,
        engine_starts=snapshot.engine_starts,
        phase=engine.phase,
        running_requests=engine.running_requests,
        waiting_requests=engine.waiting_requests,
        open_sessions=sessions.num_open,
        kv_usage=engine.kv_usage,
        window_rows=window.rows if snapshot.state == "ready" else 0,
        engine_metrics={**engine.metrics, **learned},
        policy=engine.policy,
        replicas=list(engine.replicas),
        gpus=list(snapshot.gpus),
        machine_fault=snapshot.machine_fault,
        jobs=jobs,
    )
