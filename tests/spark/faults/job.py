"""One job: a driver process, started as a scheduler would start it, and its executors on the cluster's nodes."""

import contextlib
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

from tests.spark.faults.cluster import (
    EXECUTOR_CORES,
    EXECUTOR_MEMORY_MIB,
    REPOSITORY,
    Cluster,
    Node,
    Progress,
    environment,
    wait_patiently,
)
from tests.spark.faults.network import Network
from tests.spark.faults.table import MAX_TOKENS, ROW_PROMPT, Table
from tests.spark.processes import SMALL_JVM, SMALL_SPARK

_END_S = 900.0
"""The longest wait for a job's end once its table is released."""
_MARK = "-Dpipemax.tests.job="
_CONF = {
    "spark.driver.host": "127.0.0.1",
    "spark.cores.max": str(2 * EXECUTOR_CORES),
    "spark.executor.memory": f"{EXECUTOR_MEMORY_MIB}m",
    "spark.executor.cores": str(EXECUTOR_CORES),
    "spark.executor.instances": "2",
    "spark.task.maxFailures": "8",
    "spark.stage.maxConsecutiveAttempts": "16",
    "spark.decommission.enabled": "true",
}


class Job:
    """A run of the command. ``name`` differs from the names of all other jobs of the cluster."""

    def __init__(
        self,
        cluster: Cluster,
        table: Table,
        name: str,
        *,
        work_dir: Path,
        conf: dict[str, str] | None = None,
        network: Network | None = None,
    ) -> None:
        """Start the driver, with ``conf`` among Spark's settings; its executors reach it over ``network``."""
        self.name = name
        self.work_dir = work_dir
        self.logs = table.directory / "logs" / name
        mark = f"{_MARK}{name}"
        # The mark is how a node tells this job's executors from those of others.
        self.nodes = cluster.nodes(mark)
        through, collector = _through(network)
        settings = _CONF | through | {"spark.executor.extraJavaOptions": f"{SMALL_JVM} {mark}"} | (conf or {})
        flags = " ".join(f"--conf {shlex.quote(f'{name}={value}')}" for name, value in settings.items())
        submit = f"--master {cluster.master} {flags} {SMALL_SPARK} pyspark-shell"
        self.logs.mkdir(parents=True)
        with self._driver_log.open("wb") as log:
            self._driver = subprocess.Popen(
                [
                    *(sys.executable, REPOSITORY / "jobs" / "annotate.py"),
                    *("--input", table.input, "--output", table.output),
                    *(
                        "--template",
                        f"{ROW_PROMPT}{{text}}",
                        "--id-columns",
                        "id",
                        "--max-tokens",
                        str(MAX_TOKENS),
                    ),
                    *("--engine", table.engine, "--engine-python", table.engine_python),
                    *("--commit-every", "5s", "--work-dir", work_dir, "--log-dir", self.logs),
                    *collector,
                ],
                env=environment(self.logs) | {"PYSPARK_SUBMIT_ARGS": submit},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    # The driver.

    def is_running(self) -> bool:
        return self._driver.poll() is None

    def exit_code(self) -> int:
        """Wait for the job's end."""
        return self._driver.wait(_END_S)

    def kill_driver(self) -> None:
        """Send SIGKILL to the driver and its JVM, and to nothing else."""
        self._signal(signal.SIGKILL)
        self._driver.wait()

    def pause_driver(self) -> None:
        self._signal(signal.SIGSTOP)

    def resume_driver(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        if self.is_running():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._driver.pid, number)

    # What it says.

    @property
    def _driver_log(self) -> Path:
        return self.logs / "driver.log"

    def printed(self) -> str:
        return self._driver_log.read_text()

    def logged(self) -> str:
        return (self.logs / "annotate.log").read_text()

    def was_taken_over(self) -> bool:
        """Return whether the job has ended as one does that another job has overtaken."""
        return (
            self.exit_code() == 1
            and re.search(r"was taken over by run \S+ while", self.printed()) is not None
        )

    def was_refused(self) -> bool:
        """Return whether the job has ended as one does that finds another job in its work directory."""
        words = r"another job, run \S+, is writing to this output now"
        return self.exit_code() == 2 and re.search(words, self.printed()) is not None

    # Its executors.

    def wait_until_working(self) -> None:
        """Wait until rows are done on both nodes from now on, or the job is over."""
        for node, since in [(node, node.progress()) for node in self.nodes]:
            self._wait_until_working_on(node, since)

    def _wait_until_working_on(self, node: Node, since: Progress | None) -> None:
        wait_patiently(
            lambda: node.has_gone_on(since) or self.is_over_on(node),
            f"{self.name} does rows on {node.address}",
        )

    def is_over_on(self, node: Node) -> bool:
        """Return whether the job has ended, or Spark has put both executors on the other node."""
        others = [other for other in self.nodes if other is not node]
        return not self.is_running() or any(len(other.executors()) > 1 for other in others)


def _through(network: Network | None) -> tuple[dict[str, str], list[str]]:
    """Return Spark's settings and the job's flags with which executors and engines reach the driver over a network."""
    if network is None:
        return {}, []
    port, blocks, collector = map(str, network.ports)
    settings = {
        "spark.driver.bindAddress": _CONF["spark.driver.host"],
        "spark.driver.host": network.host,
        "spark.driver.port": port,
        "spark.driver.blockManager.port": blocks,
    }
    return settings, ["--collector-port", collector]
