"""The job on YARN itself, the driver in the cluster, with the settings of ``conf/spark/yarn.conf``."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipemax.wire import ProcessIdentity
from tests.fakes.engine_python import write_engine_python
from tests.fakes.settings import fake_config
from tests.spark.delta_log import committed_files
from tests.spark.faults.cluster import REPOSITORY, SPARK_HOME
from tests.spark.processes import SMALL_JVM, servers_of
from tests.spark.yarn_cluster import YarnCluster
from tests.waiting import wait_until

pytestmark = pytest.mark.long
_MASTER = "org.apache.spark.deploy.yarn.ApplicationMaster"
ROWS, PARTITIONS = 400, 8
GPUS = 2
# What a machine this small must have otherwise than a GPU node; everything else is as the file says.
SMALLER = {
    "spark.executor.instances": "2",
    "spark.executor.cores": "2",
    "spark.executor.resource.gpu.amount": str(GPUS),
    "spark.executor.memory": "600m",
    "spark.executor.memoryOverhead": "1400m",
    "spark.driver.memory": "600m",
    "spark.driver.extraJavaOptions": SMALL_JVM,
    "spark.executor.extraJavaOptions": SMALL_JVM,
    "spark.ui.enabled": "false",
}
DISCOVERY = """#!/bin/sh
echo '{"name": "gpu", "addresses": ["4", "5"]}'
"""


@pytest.fixture(scope="module")
def yarn(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with YarnCluster(tmp_path_factory.mktemp("yarn") / "cluster", gpus_per_node=GPUS) as cluster:
        yield cluster


class Submitted:
    """``spark-submit`` of the job into the cluster, from a directory of its own."""

    def __init__(
        self,
        cluster: YarnCluster,
        directory: Path,
        engine: dict[str, Any],
        conf: dict[str, str] | None = None,
    ) -> None:
        self._cluster = cluster
        self._conf = conf or {}
        self.directory = directory
        self.engine_python = write_engine_python(directory / "python")
        (directory / "engine.yaml").write_text(json.dumps(engine))
        (directory / "discover").write_text(DISCOVERY)
        (directory / "discover").chmod(0o755)
        table = pa.table({"id": range(ROWS), "text": ["[[environ]]"] * ROWS})
        (directory / "in").mkdir()
        for part in range(PARTITIONS):
            rows = ROWS // PARTITIONS
            pq.write_table(table.slice(part * rows, rows), directory / "in" / f"{part}.parquet")
        command = [
            *(str(SPARK_HOME / "bin" / "spark-submit"), "--files", str(directory / "engine.yaml")),
            *("--properties-file", str(REPOSITORY / "conf" / "spark" / "yarn.conf")),
            *(word for name, value in self._settings().items() for word in ("--conf", f"{name}={value}")),
            *(str(REPOSITORY / "jobs" / "annotate.py"), *self._arguments()),
        ]
        self._printed = directory / "submit.log"
        with self._printed.open("wb") as log:
            self._process = subprocess.Popen(
                command,
                cwd=directory,
                env={
                    **os.environ,
                    "HADOOP_CONF_DIR": str(cluster.conf_dir),
                    "PYSPARK_PYTHON": sys.executable,
                },
                stdout=log,
                stderr=log,
            )

    def _settings(self) -> dict[str, str]:
        python_path = f"{REPOSITORY / 'engine'}{os.pathsep}{REPOSITORY}"
        return {
            **SMALLER,
            **self._conf,
            "spark.executor.resource.gpu.discoveryScript": str(self.directory / "discover"),
            # All containers are on this machine: what is unpacked or fetched for each of them lies here already.
            "spark.yarn.dist.archives": "",
            "spark.yarn.jars": f"local:{SPARK_HOME}/jars/*",
            "spark.jars.ivy": str(Path(sys.prefix) / "ivy"),
            "spark.pyspark.python": sys.executable,
            "spark.yarn.appMasterEnv.PYTHONPATH": python_path,
            "spark.executorEnv.PYTHONPATH": python_path,
        }

    def _arguments(self) -> list[str]:
        return [
            *("--input", str(self.directory / "in"), "--output", str(self.directory / "out")),
            *("--prompt-column", "text", "--id-columns", "id"),
            *("--engine", "engine.yaml", "--engine-python", self.engine_python),
            *("--summary", str(self.directory / "summary.json"), "--log-dir", str(self.directory / "logs")),
        ]

    def servers(self) -> set[ProcessIdentity]:
        return servers_of(self.engine_python)

    def reports(self) -> list[str]:
        """What the job has printed in the driver's container, one for each attempt."""
        printed = [log.read_text() for log in self._cluster.logs("stdout")]
        return [report for report in printed if str(self.directory) in report]

    def has_progress(self) -> bool:
        return any(" rows/s" in report for report in self.reports())

    def ended(self) -> None:
        """Wait for its success."""
        assert self._process.wait(400) == 0, self._printed.read_text()[-4000:]

    def rows(self) -> list[dict[str, Any]]:
        """As committed."""
        rows = pq.read_table(committed_files(self.directory / "out")).to_pylist()
        assert sorted(row["id"] for row in rows) == list(range(ROWS))
        return rows

    def summary(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.directory / "summary.json").read_text())
        return found


def test_each_yarn_container_has_an_engine_on_the_gpus_of_its_discovery_script(
    yarn: YarnCluster, tmp_path: Path
) -> None:
    # Tasks that ask for all GPUs would run one by one, but for the resource profile of those that annotate.
    conf = {"spark.task.resource.gpu.amount": str(GPUS)}
    job = Submitted(yarn, tmp_path, fake_config(load_s=1.0, tokens_per_s=200), conf)
    job.ended()
    environments = [json.loads(row["annotation"]["text"]) for row in job.rows()]
    assert {each["CUDA_VISIBLE_DEVICES"] for each in environments} == {"4,5"}
    assert {each["CUDA_DEVICE_ORDER"] for each in environments} == {"PCI_BUS_ID"}
    assert job.summary()["engines"] == 2
    (report,) = job.reports()
    assert "4 task slots" in report
    wait_until(lambda: not job.servers(), 120, "the engine servers end with their containers")


def test_a_killed_container_is_replaced_and_its_rows_are_done_once(yarn: YarnCluster, tmp_path: Path) -> None:
    job = Submitted(yarn, tmp_path, fake_config(load_s=1.0, tokens_per_s=60))
    wait_until(lambda: len(job.servers()) == 2 and job.has_progress(), 240, "both engines run, rows are done")
    first = job.servers()
    os.kill(executor_of(min(first, key=lambda server: server.pid)), signal.SIGKILL)
    wait_until(lambda: bool(job.servers() - first), 120, "a new container's engine runs")
    job.ended()
    assert len(job.rows()) == ROWS


def test_a_killed_driver_is_restarted_by_yarn_and_annotates_the_rows_left(
    yarn: YarnCluster, tmp_path: Path
) -> None:
    job = Submitted(yarn, tmp_path, fake_config(load_s=1.0, tokens_per_s=60))
    wait_until(job.has_progress, 240, "rows are done")
    first = job.servers()
    os.kill(driver_of(job), signal.SIGKILL)
    job.ended()
    assert len(job.rows()) == ROWS
    assert len(job.reports()) == 2, "one for each attempt"
    assert not first & job.servers(), "the first attempt's engines ended with it"


def driver_of(job: Submitted) -> int:
    """The JVM of the application's master: its PID."""
    for cmdline in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            command = cmdline.read_bytes().decode().split("\0")
            is_java = Path(command[0]).name == "java"  # not the shell that has started it
            if is_java and {_MASTER, job.engine_python} <= set(command):
                return int(cmdline.parent.name)
    raise AssertionError("no application master runs")


def executor_of(server: ProcessIdentity) -> int:
    """The JVM that the server's life is bound to: its PID."""
    command = Path(f"/proc/{server.pid}/cmdline").read_text().split("\0")
    (owner,) = (word for word in command if re.fullmatch(r"\d+:\d+", word))
    return int(owner.split(":")[0])
