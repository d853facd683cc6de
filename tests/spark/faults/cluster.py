"""A local cluster of two executors as processes of their own, its processes by kind, and what it answered.

``Cluster`` starts the application (``application``) and tells it what to run; everything else is seen from outside,
through /proc and the engine servers' own statistics.
"""

import contextlib
import itertools
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import flight

from pipemax.lifetime import SERVER_IDENTITY_VARIABLE
from pipemax.wire import ProcessIdentity, ServerAction, ServerStats
from tests.fakes.engine import expected_text, fake_config
from tests.fakes.engine_python import write_engine_python
from tests.spark.faults.application import MAX_TOKENS, Answer, Order
from tests.spark.processes import servers_of, wait_until

REPOSITORY = Path(__file__).resolve().parents[3]
ROWS = 600
TOKENS_PER_S = 250.0
_ANSWER_TIMEOUT_S = 400.0
_STREAM_ERRORS = (flight.FlightError, pa.ArrowException, OSError)

_CONF = {
    "spark.executor.memory": "512m",
    "spark.executor.cores": "1",
    "spark.worker.resource.gpu.amount": "4",
    "spark.executor.resource.gpu.amount": "2",
    "spark.task.resource.gpu.amount": "1",
    "spark.sql.shuffle.partitions": "2",
    "spark.databricks.delta.snapshotPartitions": "2",
    "spark.decommission.enabled": "true",
    "spark.dynamicAllocation.enabled": "true",
    "spark.dynamicAllocation.minExecutors": "2",
    "spark.dynamicAllocation.initialExecutors": "2",
    "spark.dynamicAllocation.maxExecutors": "2",
}
# Two workers on one machine, each with four GPUs of its own, as two machines would have.
_DISCOVERY = """#!/bin/sh
if mkdir {directory}/first 2>/dev/null; then set 0 1 2 3; else set 4 5 6 7; fi
echo "{{\\"name\\": \\"gpu\\", \\"addresses\\": [\\"$1\\", \\"$2\\", \\"$3\\", \\"$4\\"]}}"
"""
_SMI = """#!/bin/sh
for gpu in 0 1 2 3 4 5 6 7; do echo "$gpu, GPU-{mark}-$gpu"; done
"""


class Cluster:
    """With it, an application runs; at its end, so do no executors and no engine servers."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.input = directory / "in.parquet"
        # A worker of the engine that outlives its server, as those that hold a lot of GPU memory do.
        self.engine = fake_config(tokens_per_s=TOKENS_PER_S, child_process=True, child_ends_after_s=0.5)
        self.engine_python = write_engine_python(directory / "python", "--poll-stall-s=1")
        self._numbers = itertools.count(1)
        self._answers: dict[int, queue.SimpleQueue[Answer]] = {}
        self._mark = f"faults-{os.getpid()}-{directory.name}"
        self._write_input({})

    def __enter__(self) -> Self:
        self._start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.stdin.close()  # type: ignore[union-attr]
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(60)
        self.kill_driver()
        self._errors.close()
        for file in Path(f"/tmp/pipemax-{os.getuid()}/gpus").glob(f"GPU-{self._mark}-*"):
            file.unlink()

    # What runs.

    def submit(self, kind: str = "frame", **values: Any) -> int:
        """Have the application run something; its number."""
        number = next(self._numbers)
        values.setdefault("output", str(self.directory / f"out-{number}"))
        values = {
            "input": str(self.input),
            "engine": self.engine,
            "engine_python": self.engine_python,
            **values,
        }
        self._answers[number] = queue.SimpleQueue()
        order = Order(number=number, kind=kind, **values)
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(asdict(order)) + "\n")
        self._process.stdin.flush()
        return number

    def answer(self, number: int, timeout_s: float = _ANSWER_TIMEOUT_S) -> Answer:
        deadline_s = time.monotonic() + timeout_s
        while True:
            try:
                return self._answers[number].get(timeout=1.0)
            except queue.Empty:
                assert self._process.poll() is None, f"the application ended: {self._driver_log()}"
                assert time.monotonic() < deadline_s, f"no answer in {timeout_s} s: {self._driver_log()}"

    def _driver_log(self) -> str:
        return (self.directory / "driver.log").read_text()[-3000:]

    def is_running(self, number: int) -> bool:
        return self._answers[number].empty()

    def has_answered(self, number: int, *, within_s: float) -> bool:
        deadline_s = time.monotonic() + within_s
        while self.is_running(number) and time.monotonic() < deadline_s:
            time.sleep(0.05)
        return not self.is_running(number)

    def wait_until_rows_run(self) -> None:
        wait_until(
            lambda: any(stats.running_requests for stats in self.stats()), 120, "rows run in an engine"
        )

    def input_with(self, marks: dict[int, str]) -> str:
        """An input like all the others, with marks for the fake engine before the texts of some rows."""
        path = self.directory / f"in-{next(self._numbers)}.parquet"
        self._write_input(marks, path)
        return str(path)

    # What there is, from outside.

    def executors(self) -> list[ProcessIdentity]:
        """The JVMs below the driver's own."""
        driver = set(_children([self._process.pid]))
        return [ProcessIdentity.of(pid) for pid in _children(driver) if _name(pid) == "java"]

    def python_workers(self) -> list[ProcessIdentity]:
        """Those that run tasks: children of the executors' daemons."""
        daemons = _children(executor.pid for executor in self.executors())
        return [ProcessIdentity.of(pid) for pid in _children(daemons)]

    def servers(self) -> list[ProcessIdentity]:
        return sorted(servers_of(self.engine_python), key=lambda server: server.pid)

    def engine_workers(self) -> list[ProcessIdentity]:
        """The processes of the servers' engines."""
        marks = {f"{SERVER_IDENTITY_VARIABLE}={s.pid}:{s.start_ticks}\0".encode() for s in self.servers()}
        found = []
        for environ in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                text = environ.read_bytes()
                if any(mark in text for mark in marks):
                    found.append(ProcessIdentity.of(int(environ.parent.name)))
        return found

    def stats(self) -> Iterator[ServerStats]:
        """Of each server that answers."""
        for server in self.servers():
            socket = self.socket_of(server)
            with contextlib.suppress(*_STREAM_ERRORS), flight.FlightClient(f"grpc+unix://{socket}") as client:
                options = flight.FlightCallOptions(timeout=2)
                (answer,) = client.do_action(flight.Action(ServerAction.STATS, b""), options)
                yield ServerStats.from_bytes(answer.body.to_pybytes())

    def socket_of(self, server: ProcessIdentity) -> Path:
        return Path(_argument(server.pid, "--socket"))

    def executor_of(self, server: ProcessIdentity) -> int:
        """The pid of the JVM whose server it is."""
        return int(_argument(server.pid, "--watch-jvm").partition(":")[0])

    def visible_gpus(self, server: ProcessIdentity) -> str:
        variables = Path(f"/proc/{server.pid}/environ").read_bytes().decode().split("\0")
        return dict(v.split("=", 1) for v in variables if v)["CUDA_VISIBLE_DEVICES"]

    def logs(self) -> str:
        """Of all engine servers that there were."""
        return "".join(log.read_text() for log in self.directory.glob("logs/pipemax-engine-*.log"))

    def kill_driver(self) -> None:
        """kill -9 of the driver and its JVM, and of nothing else."""
        executors = self.executors()
        for pid in [self._process.pid, *_children([self._process.pid])]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait()
        wait_until(
            lambda: not self.servers() and not any(e.is_running() for e in executors),
            60,
            "executors and engine servers end with their driver",
        )

    def restart(self) -> None:
        """After ``kill_driver``: the application again."""
        self._start()

    def _start(self) -> None:
        bin_directory = self.directory / "bin"
        bin_directory.mkdir(exist_ok=True)
        gpus = self.directory / "gpus"
        gpus.mkdir(exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            (gpus / "first").rmdir()
        discovery = _executable(bin_directory / "discover", _DISCOVERY.format(directory=gpus))
        _executable(bin_directory / "nvidia-smi", _SMI.format(mark=self._mark))
        conf = {**_CONF, "spark.worker.resource.gpu.discoveryScript": discovery}
        flags = " ".join(f"--conf {name}={value}" for name, value in conf.items())
        self._errors = (self.directory / "driver.log").open("ab")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.spark.faults.application", str(self.directory)],
            cwd=REPOSITORY,
            env={
                **os.environ,
                "PATH": f"{bin_directory}{os.pathsep}{os.environ['PATH']}",
                "PYSPARK_SUBMIT_ARGS": f"--master local-cluster[2,2,2048] {flags} pyspark-shell",
                "MLFLOW_TRACKING_URI": "http://127.0.0.1:9",  # gone
            },
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            start_new_session=True,
        )
        threading.Thread(target=self._listen, args=(self._process,), daemon=True).start()

    def _listen(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            values = json.loads(line)
            rows = [(row[0], row[1], row[2]) for row in values.pop("rows")]
            self._answers[values["number"]].put(Answer(**values, rows=rows))

    def _write_input(self, marks: dict[int, str], path: Path | None = None) -> None:
        texts = [f"{marks.get(row, '')} word {row}".strip() for row in range(ROWS)]
        pq.write_table(pa.table({"id": list(range(ROWS)), "text": texts}), path or self.input)


def assert_as_undisturbed(answer: Answer, marked: frozenset[int] = frozenset()) -> None:
    """No row lost, none doubled, none an error, and each with the text that it always gets; of ``marked`` rows, whose
    prompts differ, any text."""
    assert answer.error is None
    assert sorted(row[0] for row in answer.rows) == list(range(ROWS))
    assert [row for row in answer.rows if row[2] is not None] == [], "rows were condemned"
    texts = {row[0]: row[1] for row in answer.rows if row[0] not in marked}
    assert texts == {row: expected_text(f"Say word {row}", MAX_TOKENS) for row in texts}


def _executable(path: Path, text: str) -> str:
    path.write_text(text)
    path.chmod(0o755)
    return str(path)


def _argument(pid: int, flag: str) -> str:
    arguments = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
    return arguments[arguments.index(flag) + 1]


def _name(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip()
    return ""


def _children(pids: Iterable[int]) -> list[int]:
    wanted, found = set(pids), []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if int(stat.read_text().rpartition(")")[2].split()[1]) in wanted:
                found.append(int(stat.parent.name))
    return found
