"""YARN itself on this machine: Hadoop's ResourceManager and two NodeManagers, in a JVM of their own.

``python -m tests.spark.yarn_cluster DIRECTORY GPUS_PER_NODE`` runs it until it is told to end, with the jars that
``YarnCluster`` has fetched. Containers are processes of this machine.
"""

import contextlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.spark.faults.cluster import REPOSITORY, SPARK_HOME
from tests.spark.processes import SMALL_JVM
from tests.waiting import wait_until
from tools.configure_spark import resolve_jars

NODES = 2
NODE_MEMORY_MIB, NODE_CORES = 4_096, 8
_ALSO = ("org.bouncycastle:bcpkix-jdk18on:1.82", "org.junit.jupiter:junit-jupiter-api:5.13.4")
"""What Hadoop's own tests bring along: the ResourceManager signs certificates, directories are made by assertion."""
_HAS_SPARK = (
    "org.apache.hadoop:hadoop-client-api",
    "org.apache.hadoop:hadoop-client-runtime",
    "org.xerial.snappy:snappy-java",
)


class YarnCluster:
    """While entered, Hadoop's client settings lie in ``conf_dir``."""

    def __init__(self, directory: Path, *, gpus_per_node: int) -> None:
        self.directory = directory
        self.gpus_per_node = gpus_per_node
        self.conf_dir = directory / "conf"
        self._daemon: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.directory.mkdir()
        jars = ":".join(str(jar) for jar in _jars())
        with (self.directory / "daemon.log").open("ab") as log:
            self._daemon = subprocess.Popen(
                [sys.executable, "-m", __name__, str(self.directory), str(self.gpus_per_node)],
                env={
                    **os.environ,
                    "PYTHONPATH": str(REPOSITORY),
                    "PYSPARK_SUBMIT_ARGS": (
                        f"--driver-class-path {jars} --driver-java-options '{SMALL_JVM}' pyspark-shell"
                    ),
                },
                cwd=self.directory,  # the cluster writes into "target"
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        try:
            wait_until(self._is_up, 120, f"YARN is up: {self.directory / 'daemon.log'}")
        except BaseException:
            self._stop(self._daemon)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._daemon is not None
        self._stop(self._daemon)

    @staticmethod
    def _stop(daemon: subprocess.Popen[bytes]) -> None:
        daemon.terminate()
        try:
            daemon.wait(120)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(daemon.pid, signal.SIGKILL)

    def logs(self, name: str) -> list[Path]:
        """The containers' files of this name: stdout or stderr."""
        data = self.directory / "target" / "test" / "data" / "yarn"
        return list(data.glob(f"*/yarn-logDir-*/application_*/container_*/{name}"))

    def _is_up(self) -> bool:
        assert self._daemon is not None
        assert self._daemon.poll() is None, (self.directory / "daemon.log").read_text()[-4000:]
        return (self.conf_dir / "core-site.xml").exists()


def _jars() -> list[Path]:
    """Fetched once by Spark, into this Python environment."""
    (client,) = SPARK_HOME.glob("jars/hadoop-client-api-*.jar")
    version = re.fullmatch(r"hadoop-client-api-(.+)\.jar", client.name)
    assert version is not None
    cluster = f"org.apache.hadoop:hadoop-client-minicluster:{version[1]}"
    return resolve_jars([cluster, *_ALSO], Path(sys.prefix) / "ivy-yarn", without=_HAS_SPARK)


def _run(directory: Path, gpus_per_node: int) -> None:
    from pyspark.java_gateway import launch_gateway

    jvm = launch_gateway().jvm  # type: ignore[no-untyped-call]
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    settings = jvm.org.apache.hadoop.yarn.conf.YarnConfiguration()
    for name, value in _settings(gpus_per_node).items():
        settings.set(name, value)
    cluster = jvm.org.apache.hadoop.yarn.server.MiniYARNCluster("yarn", NODES, 1, 1)
    cluster.init(settings)
    cluster.start()
    assert cluster.waitForNodeManagersToConnect(60_000)
    _write_client_settings(jvm, cluster.getConfig(), directory / "conf")
    signal.sigwait({signal.SIGTERM})
    cluster.stop()  # ends the containers that still run


def _settings(gpus_per_node: int) -> dict[str, str]:
    return {
        "fs.defaultFS": "file:///",
        "yarn.resource-types": "yarn.io/gpu",
        "yarn.nodemanager.resource-type.yarn.io/gpu": str(gpus_per_node),
        "yarn.nodemanager.resource.memory-mb": str(NODE_MEMORY_MIB),
        "yarn.minicluster.yarn.nodemanager.resource.memory-mb": str(NODE_MEMORY_MIB),
        "yarn.nodemanager.resource.cpu-vcores": str(NODE_CORES),
        "yarn.scheduler.minimum-allocation-mb": "64",
        "yarn.scheduler.maximum-allocation-mb": str(NODE_MEMORY_MIB),
        # Counts GPUs at all; the default counts memory alone.
        "yarn.scheduler.capacity.resource-calculator": (
            "org.apache.hadoop.yarn.util.resource.DominantResourceCalculator"
        ),
        "yarn.scheduler.capacity.maximum-am-resource-percent": "1.0",
        "yarn.scheduler.capacity.root.queues": "default",
        "yarn.scheduler.capacity.root.default.capacity": "100",
        "yarn.nodemanager.vmem-check-enabled": "false",
        "yarn.nodemanager.disk-health-checker.max-disk-utilization-per-disk-percentage": "100",
        "yarn.nodemanager.delete.debug-delay-sec": "3600",  # logs are looked at afterwards
    }


def _write_client_settings(jvm: Any, settings: Any, directory: Path) -> None:
    directory.mkdir()
    for name in ("yarn-site.xml", "core-site.xml"):
        file = jvm.java.io.FileOutputStream(str(directory / name))
        settings.writeXml(file)
        file.close()


if __name__ == "__main__":
    _run(Path(sys.argv[1]), int(sys.argv[2]))
