"""A standalone Spark cluster of two nodes on this machine, and each node's processes by kind.

The nodes are two addresses of the loopback, so to Spark they are two hosts: only to another host does it copy a slow
task. Everything is seen from outside, through /proc and the engine servers' own statistics.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import pyarrow as pa
import pyspark
from pyarrow import flight

from pipemax.wire import ProcessIdentity, ServerAction, ServerStats
from tests.spark.processes import SMALL_JVM, servers_of
from tests.waiting import wait_until

REPOSITORY = Path(__file__).resolve().parents[3]
SPARK_HOME = Path(os.environ.get("SPARK_HOME", Path(pyspark.__file__).parent))
EXECUTOR_CORES = 2
EXECUTOR_MEMORY_MIB = 512
_HEAD = "127.0.0.1"
_NODES = ("127.0.0.2", "127.0.0.3")
_STATS_TIMEOUT_S = 2.0
_PATIENCE_S = 600.0  # a start of Spark takes minutes on a machine that runs other tests
_POLL_S = 0.25  # a look at a node reads all of /proc


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a node's engine server is."""

    server: int
    rows_done: int

    def is_beyond(self, earlier: "Progress | None") -> bool:
        """Rows were done since; all of a successor's are."""
        is_same = earlier is not None and earlier.server == self.server
        return self.rows_done > (earlier.rows_done if is_same and earlier is not None else 0)


class Node:
    """One worker of the cluster with what one application runs on it, as a rule one executor at a time."""

    def __init__(self, address: str, worker: subprocess.Popen[bytes], mark: str) -> None:
        """``mark`` is an argument in the command line of the application's executors."""
        self.address = address
        self._worker = worker
        self._mark = mark

    def executors(self) -> list[ProcessIdentity]:
        """The JVMs."""
        return [
            identity
            for identity in _children([self._worker.pid])
            if _name(identity.pid) == "java" and self._mark in _arguments(identity.pid)
        ]

    def executor(self) -> ProcessIdentity | None:
        """The latest one's JVM."""
        return _latest(self.executors())

    def python_workers(self) -> list[ProcessIdentity]:
        """Those that run tasks, or wait for the next: children of the executor's daemon."""
        executor = self.executor()
        daemons = [] if executor is None else _children([executor.pid])
        return _children(daemon.pid for daemon in daemons)

    def server(self) -> ProcessIdentity | None:
        executor = self.executor()
        if executor is None:
            return None
        return _latest(servers_of(f"{executor.pid}:{executor.start_ticks}"))

    def engine_worker(self) -> ProcessIdentity | None:
        """The process of the engine that is not its server."""
        stats = self.stats()
        if stats is None or "child_pid" not in stats.engine_metrics:
            return None
        with contextlib.suppress(ProcessLookupError):
            return ProcessIdentity.of(int(stats.engine_metrics["child_pid"]))
        return None

    def socket(self) -> Path | None:
        """Of the server."""
        server = self.server()
        if server is None:
            return None
        arguments = _arguments(server.pid)
        with contextlib.suppress(ValueError):
            return Path(arguments[arguments.index("--socket") + 1])
        return None

    def stats(self) -> ServerStats | None:
        """None while no server answers."""
        path = self.socket()
        if path is None:
            return None
        options = flight.FlightCallOptions(timeout=_STATS_TIMEOUT_S)
        with (
            contextlib.suppress(flight.FlightError, pa.ArrowException, OSError),
            flight.FlightClient(f"grpc+unix://{path}") as client,
        ):
            (answer,) = client.do_action(flight.Action(ServerAction.STATS, b""), options)
            return ServerStats.from_bytes(answer.body.to_pybytes())
        return None

    def progress(self) -> Progress | None:
        stats = self.stats()
        if stats is None:
            return None
        return Progress(stats.pid, sum(job.rows_done for job in stats.jobs.values()))

    def has_gone_on(self, since: Progress | None) -> bool:
        now = self.progress()
        return now is not None and now.is_beyond(since)


class Cluster:
    """With it there are a master and two workers; at its end nothing of theirs is left."""

    def __init__(self, directory: Path, *, applications: int = 1) -> None:
        """``applications`` run at once, each with one executor on each node."""
        self.directory = directory
        self._applications = applications
        self._workers: dict[str, subprocess.Popen[bytes]] = {}
        self._daemons: list[subprocess.Popen[bytes]] = []
        self._port = _free_port()

    @property
    def master(self) -> str:
        return f"spark://{_HEAD}:{self._port}"

    def __enter__(self) -> Self:
        self._start_daemon("master.Master", _HEAD, "--port", str(self._port))
        # A worker that finds no master waits for long before it tries again.
        wait_until(self._master_listens, 180, "Spark's master listens")
        for address in _NODES:
            arguments = (
                *("--cores", str(EXECUTOR_CORES * self._applications)),
                *("--memory", f"{EXECUTOR_MEMORY_MIB * self._applications}m"),
                *("-d", str(self.directory / address)),
            )
            self._workers[address] = self._start_daemon("worker.Worker", address, *arguments, self.master)
        return self

    def nodes(self, mark: str) -> list[Node]:
        """With the executors of the application whose command lines hold ``mark``."""
        return [Node(address, worker, mark) for address, worker in self._workers.items()]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        executors = _children(worker.pid for worker in self._workers.values())
        servers = [s for e in executors for s in servers_of(f"{e.pid}:{e.start_ticks}")]
        for daemon in reversed(self._daemons):
            daemon.terminate()
        for daemon in self._daemons:
            daemon.wait(60)
        wait_until(
            lambda: not any(p.is_running() for p in (*executors, *servers)), 60, "the cluster's processes end"
        )

    def _start_daemon(self, name: str, address: str, *arguments: str) -> subprocess.Popen[bytes]:
        logs = self.directory / "daemons"
        logs.mkdir(exist_ok=True)
        command = [str(SPARK_HOME / "bin" / "spark-class"), f"org.apache.spark.deploy.{name}"]
        with (logs / f"{address}.log").open("ab") as log:
            daemon = subprocess.Popen(
                [*command, "--host", address, "--webui-port", "0", *arguments],
                env=environment(logs) | {"SPARK_DAEMON_MEMORY": "256m", "SPARK_DAEMON_JAVA_OPTS": SMALL_JVM},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._daemons.append(daemon)
        return daemon

    def _master_listens(self) -> bool:
        with contextlib.suppress(OSError), socket.create_connection((_HEAD, self._port), timeout=1):
            return True
        return False


def environment(logs: Path) -> dict[str, str]:
    """For drivers, and for the workers, from which executors and their Python inherit it."""
    return {
        **os.environ,
        "SPARK_HOME": str(SPARK_HOME),
        "PYSPARK_PYTHON": sys.executable,
        "PYTHONPATH": f"{REPOSITORY / 'engine'}{os.pathsep}{REPOSITORY}",
        "PIPEMAX_LOG_DIR": str(logs),
        "MLFLOW_TRACKING_URI": "http://127.0.0.1:9",  # gone
    }


def wait_patiently(condition: Callable[[], bool], what: str) -> None:
    """Like ``wait_until``, for conditions that take milliseconds to find out."""
    deadline_s = time.monotonic() + _PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline_s, f"not within {_PATIENCE_S} s: {what}"
        time.sleep(_POLL_S)


def send(number: signal.Signals, processes: Iterable[ProcessIdentity]) -> None:
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, number)


def _free_port() -> int:
    with socket.socket() as found:
        found.bind((_HEAD, 0))
        return int(found.getsockname()[1])


def _latest(processes: Iterable[ProcessIdentity]) -> ProcessIdentity | None:
    running = [process for process in processes if process.is_running()]
    return max(running, key=lambda process: process.start_ticks, default=None)


def _name(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip()
    return ""


def _arguments(pid: int) -> list[str]:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    return []


def _children(pids: Iterable[int]) -> list[ProcessIdentity]:
    parents, found = set(pids), []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if int(stat.read_text().rpartition(")")[2].split()[1]) in parents:
                found.append(ProcessIdentity.of(int(stat.parent.name)))
    return found
