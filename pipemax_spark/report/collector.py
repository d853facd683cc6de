"""Collect the reports that engine servers and tasks send to the driver every few seconds.

The collector is a Flight server with one action and a token. ``report_totals`` adds up the reports. If no report
reaches the driver, for instance because of a firewall, ``SilenceWatch`` warns of that.
"""

import logging
import math
import secrets
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Self

import pyarrow as pa
from pyarrow import flight

from pipemax.wire import (
    COLLECTOR_ACTION_STATS,
    CollectorAddress,
    JobOutlook,
    JobStats,
    ServerStats,
)
from pipemax_spark.errors import JobError
from pipemax_spark.executor.task_reports import is_from_task
from pipemax_spark.report.engine_rates import EngineRates, ReplicaTotals
from pipemax_spark.report.report_totals import SILENT_S, ReportTotals, Totals
from pipemax_spark.report.time_accounts import TimeAccounts
from pipemax_spark.spark.session import is_connect

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

log = logging.getLogger(__name__)

_REPORTS_PER_S = 25
"""Number of reports from engine servers, and the same number from tasks, that the collector requests. A report costs
about 1.4 ms of CPU."""
_LONGEST_SERVER_WAIT_S = SILENT_S / 3
_LONGEST_TASK_WAIT_S = 30.0
"""This bounds how late the error limits see the tasks' reports."""
_SILENT_AFTER_S = 60.0
"""Engine servers report every second from their start on, even while they load."""
_STOCK = "vllm"
"""The policy of engines that run stock vLLM."""


class Collector:
    """Listens for reports from entry to exit."""

    def __init__(
        self,
        *,
        host: str,
        bind_hosts: list[str],
        job_id: str,
        port: int = 0,
        on_report: Callable[[ServerStats, JobStats], None] | None = None,
    ) -> None:
        """Prepare the collector.

        ``host`` is the address for executors. The collector listens on the first of ``bind_hosts`` that can be bound,
        at ``port``, or at a free port if that is 0. ``on_report`` gets each engine server's report, on any thread.
        """
        self._host = host
        self._bind_hosts = bind_hosts
        self._port = port
        self._job_id = job_id
        self._on_report = on_report
        self._rows_total: int | None = None
        # Of this job. To be read after the exit, when no report comes any more.
        self.accounts = TimeAccounts()
        self.replicas = ReplicaTotals()
        self.rates = EngineRates()
        self._token = secrets.token_urlsafe(24)
        self._lock = threading.Lock()
        self._totals = ReportTotals(self.job_of)

    @classmethod
    def for_session(
        cls,
        spark: "SparkSession",
        job_id: str,
        *,
        port: int = 0,
        on_report: Callable[[ServerStats, JobStats], None] | None = None,
    ) -> "Collector":
        """Create a collector that is reachable at the address of Spark's driver, if this process is the driver."""
        if is_connect(spark):
            return UnheardCollector(job_id=job_id)
        host, bind_hosts = driver_hosts(spark)
        return cls(host=host, bind_hosts=bind_hosts, job_id=job_id, port=port, on_report=on_report)

    def __enter__(self) -> Self:
        self._started_s = self._last_heard_s = time.monotonic()
        self._server = self._listen()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()

    @property
    def address(self) -> CollectorAddress | None:
        """Where executors reach the collector; None if they cannot."""
        return CollectorAddress(host=self._host, port=self._server.port, token=self._token)

    def silent_s(self) -> float:
        """Return the seconds since the last report, or since the start if none has arrived."""
        with self._lock:
            return time.monotonic() - self._last_heard_s

    def committed(self, rows: int) -> None:
        """Take rows that were found in the output's history, of which reports have told already."""

    def expect(self, rows: int) -> None:
        """Add ``rows`` to the rows to be done, so that the servers learn how many are left."""
        with self._lock:
            self._rows_total = (self._rows_total or 0) + rows

    def servers(self) -> list[ServerStats]:
        """Return the latest report of each engine server that still reports, sorted by name."""
        with self._lock:
            return self._totals.servers(now_s=time.monotonic())

    def totals(self) -> Totals:
        with self._lock:
            return self._totals.totals()

    def engines(self) -> int:
        """Count the servers, alive or dead, that have completed rows of this job."""
        with self._lock:
            return self._totals.num_servers_with_rows()

    def engine_rows(self) -> int | None:
        """Return the number of rows for the engine with the most room; None before the first has loaded."""
        return max((server.window_rows for server in self.servers()), default=0) or None

    def length_correlation(self, *, earlier: float | None = None) -> float | None:
        """Return the mean of what engines under stock vLLM have learned of the prompts and answers of this job.

        Before they have, return what an ``earlier`` run of this job had learned.

        PipeMax's engines do not count: rows with long prompts and long answers together fill its memory, which cost up
        to 9% of a simulated run.
        """
        servers = self.servers()
        policies = [(server.policy or {}).get("chosen") for server in servers]
        learned = [self.job_of(server).length_correlation for server in servers]
        known = [
            correlation
            for correlation, policy in zip(learned, policies, strict=True)
            if correlation is not None and policy == _STOCK
        ]
        if known:
            return sum(known) / len(known)
        return earlier if {*policies} <= {_STOCK, None} else None

    def outlook(self, *, for_task: bool = False) -> JobOutlook | None:
        """Return what is left for the engines; None if the job's size is not known."""
        with self._lock:
            if self._rows_total is None:
                return None
            now_s = time.monotonic()
            engines = self._totals.num_servers(now_s=now_s)
            if for_task:
                report_after_s = min(_LONGEST_TASK_WAIT_S, self._totals.num_tasks() / _REPORTS_PER_S)
            else:
                report_after_s = min(_LONGEST_SERVER_WAIT_S, engines / _REPORTS_PER_S)
            return JobOutlook(
                job_id=self._job_id,
                rows_left=max(0, self._rows_total - self._totals.rows_taken(now_s=now_s)),
                engines=engines,
                report_after_s=report_after_s,
            )

    def job_of(self, stats: ServerStats) -> JobStats:
        """Return this job's part of a server's report."""
        return stats.jobs.get(self._job_id, JobStats())

    def _listen(self) -> "_StatsServer":
        failures = []
        for host in dict.fromkeys(self._bind_hosts):
            try:
                _check_free(host, self._port)
                return _StatsServer(f"grpc+tcp://{host}:{self._port}", self._token, self._answer)
            except (flight.FlightError, pa.ArrowException, OSError) as error:
                failures.append(f"{host}: {error}")
        port = f" at --collector-port {self._port}" if self._port else ""
        raise JobError(
            f"the driver cannot listen for the engines' reports{port}: {'; '.join(failures)}; give another "
            "--collector-port"
        )

    def _answer(self, stats: ServerStats) -> JobOutlook | None:
        self._take(stats)
        if is_from_task(stats):
            return self.outlook(for_task=True)
        if self._on_report is not None:
            self._on_report(stats, self.job_of(stats))
        return self.outlook()

    def _take(self, stats: ServerStats) -> None:
        with self._lock:
            now_s = self._last_heard_s = time.monotonic()
            if self._totals.take(stats, now_s=now_s):
                self.accounts.add(stats, job_age_s=now_s - self._started_s)
                self.replicas.add(stats, self.job_of(stats))
                self.rates.add(stats, self.job_of(stats))


class UnheardCollector(Collector):
    """Hears no report, because a client of Spark Connect cannot be reached; what is committed counts as done."""

    def __init__(self, *, job_id: str) -> None:
        super().__init__(host="", bind_hosts=[], job_id=job_id)
        self._rows_committed = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    @property
    def address(self) -> None:
        """Nobody can report."""
        return None

    def silent_s(self) -> float:
        """No report comes, ever."""
        return math.inf

    def totals(self) -> Totals:
        with self._lock:
            return replace(self._totals.totals(), rows_done=self._rows_committed)

    def committed(self, rows: int) -> None:
        with self._lock:
            self._rows_committed += rows


def driver_hosts(spark: "SparkSession") -> tuple[str, list[str]]:
    """Return the driver's address for others, and the addresses at which it may listen, the best first."""
    conf = spark.sparkContext.getConf()
    if conf.get("spark.master", "").startswith("local["):
        return "127.0.0.1", ["127.0.0.1"]
    host = conf.get("spark.driver.host", "127.0.0.1")
    # In a container, the advertised address may be known only outside the container.
    return host, [conf.get("spark.driver.bindAddress", host), host, "0.0.0.0"]


class SilenceWatch:
    """Warns once if tasks run and no engine's report reaches the driver."""

    def __init__(
        self,
        collector: Collector,
        *,
        running_tasks: Callable[[], int],
        warn: Callable[[str], None],
        now_s: float,
    ) -> None:
        self._collector = collector
        self._running_tasks = running_tasks
        self._warn = warn
        self._since_s = now_s
        self._is_over = False

    def look(self, now_s: float) -> None:
        """Check for silence; call this about every second."""
        if self._is_over:
            return
        silent_s = min(self._collector.silent_s(), now_s - self._since_s)
        if not self._running_tasks():
            self._since_s = now_s
        elif silent_s > _SILENT_AFTER_S:
            self._is_over = True
            address = self._collector.address
            assert address is not None, "where nobody can report, no task is seen running"
            self._warn(
                f"tasks are running, but no engine's report has reached the driver at {address.host}:{address.port} "
                f"for {_SILENT_AFTER_S:.0f} s: a firewall probably blocks that port. Give --collector-port a "
                "port that executors can reach. Until then no progress is shown, and error limits are checked at "
                "each commit"
            )


def _check_free(host: str, port: int) -> None:
    """Raise ``OSError`` if the port is taken.

    gRPC would share the port, and each listener would get some of the reports.
    """
    if port:
        with socket.socket() as probe:
            probe.bind((host, port))


class _TokenCheck(flight.ServerMiddlewareFactory):  # type: ignore[misc]  # pyarrow is untyped
    def __init__(self, token: str) -> None:
        super().__init__()
        self._expected = f"Bearer {token}".encode()

    def start_call(self, info: flight.CallInfo, headers: dict[str, list[str]]) -> None:
        sent = next((values[0] for name, values in headers.items() if name.lower() == "authorization"), "")
        if not secrets.compare_digest(sent.encode(), self._expected):
            raise flight.FlightUnauthenticatedError("the collector's token is missing or wrong")


class _StatsServer(flight.FlightServerBase):  # type: ignore[misc]  # pyarrow is untyped
    def __init__(self, location: str, token: str, answer: Callable[[ServerStats], JobOutlook | None]) -> None:
        super().__init__(location, middleware={"token": _TokenCheck(token)})
        self._answer = answer

    def do_action(self, context: flight.ServerCallContext, action: flight.Action) -> list[bytes]:
        if action.type != COLLECTOR_ACTION_STATS:
            raise flight.FlightServerError(f"the collector knows no action {action.type!r}")
        outlook = self._answer(ServerStats.from_bytes(action.body.to_pybytes()))
        return [outlook.to_bytes()] if outlook is not None else []
