"""A table, and the job that annotates it on a cluster: the command that a scheduler would run, and run again.

What is committed is read past Spark, from Delta's log and its files.
"""

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from tests.fakes.engine import expected_text, fake_config
from tests.fakes.engine_python import write_engine_python
from tests.spark.delta_log import actions, committed_files
from tests.spark.faults.cluster import CORES_PER_NODE, REPOSITORY, Cluster, environment
from tests.spark.processes import SMALL_JVM, SMALL_SPARK

MAX_TOKENS = 16
_CONF = {
    "spark.driver.host": "127.0.0.1",
    "spark.executor.memory": "512m",
    "spark.executor.extraJavaOptions": SMALL_JVM,
    "spark.executor.cores": str(CORES_PER_NODE),
    "spark.executor.instances": "2",
    "spark.task.maxFailures": "8",
    "spark.stage.maxConsecutiveAttempts": "16",
    "spark.decommission.enabled": "true",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One of the output."""

    id: int
    text: str | None
    error: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    """How an output differs from an undisturbed run's."""

    lost: int
    doubled: int
    changed: int
    """Rows with another answer."""
    condemned: frozenset[int]
    """Ids of error rows."""


class Table:
    """Rows in, and a job that may be started again after whatever ended it.

    While it is held, engines finish few rows a second, so that a job lasts until it was disturbed enough.
    """

    def __init__(self, cluster: Cluster, directory: Path, *, rows: int, work_dir: Path) -> None:
        self._cluster = cluster
        self._directory = directory
        self._work_dir = work_dir
        self._texts: dict[int, str] = {}
        self._job: subprocess.Popen[bytes] | None = None
        self._hold = directory / "hold"
        self.output = directory / "out"
        self.logs = directory / "logs"
        engine = fake_config(
            load_s=1.0, held_by=str(self._hold), held_row_s=0.05, child_process=True, child_ends_after_s=0.5
        )
        (directory / "engine.yaml").write_text(yaml.safe_dump(engine))
        # Small windows: what a death costs, and the search for a row that kills, end soon.
        self._engine_python = write_engine_python(directory / "python", "--chunk-rows=8", "--max-rows=32")
        self.append([f"word {row}" for row in range(rows)])
        self.hold()

    def append(self, texts: list[str]) -> list[int]:
        """More rows for the next run; their ids."""
        ids = list(range(len(self._texts), len(self._texts) + len(texts)))
        self._texts.update(zip(ids, texts, strict=True))
        rows = pa.table({"id": list(self._texts), "text": list(self._texts.values())})
        pq.write_table(rows, self._directory / "in.parquet")
        return ids

    def hold(self) -> None:
        self._hold.touch()

    def release(self) -> None:
        self._hold.unlink()

    # The job.

    def start_job(self, **conf: str) -> None:
        """Always the same command; ``conf`` is Spark's, with underscores for dots."""
        settings = _CONF | {name.replace("_", "."): value for name, value in conf.items()}
        flags = " ".join(f"--conf {shlex.quote(f'{name}={value}')}" for name, value in settings.items())
        self.logs.mkdir(exist_ok=True)
        with self._driver_log.open("ab") as log:
            self._job = subprocess.Popen(
                [
                    *(sys.executable, REPOSITORY / "jobs" / "annotate.py"),
                    *("--input", self._directory / "in.parquet", "--output", self.output),
                    *("--template", "Say {text}", "--id-columns", "id", "--max-tokens", str(MAX_TOKENS)),
                    *("--engine", self._directory / "engine.yaml", "--engine-python", self._engine_python),
                    *("--commit-every", "5s", "--work-dir", self._work_dir, "--log-dir", self.logs),
                ],
                env=environment(self.logs)
                | {
                    "PYSPARK_SUBMIT_ARGS": f"--master {self._cluster.master} {flags} {SMALL_SPARK} pyspark-shell"
                },
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def is_running(self) -> bool:
        return self._job is not None and self._job.poll() is None

    def exit_code(self, within_s: float = 300.0) -> int:
        """Of the job, once it has ended."""
        assert self._job is not None
        return self._job.wait(within_s)

    def kill_driver(self) -> None:
        """kill -9 of the driver and its JVM; of nothing else."""
        if self._job is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._job.pid, signal.SIGKILL)
            self._job.wait()

    @property
    def _driver_log(self) -> Path:
        return self.logs / "driver.log"

    def printed(self) -> str:
        """By the drivers so far."""
        return self._driver_log.read_text()

    # What is committed.

    def rows(self) -> list[Row]:
        files = committed_files(self.output)
        tables = [pq.read_table(file, columns=["id", "annotation"]) for file in files]
        return [
            Row(
                id=row["id"],
                text=row["annotation"]["text"],
                error=(row["annotation"]["error"] or {}).get("code"),
            )
            for table in tables
            for row in table.to_pylist()
        ]

    def damage(self) -> Damage:
        rows = self.rows()
        times = Counter(row.id for row in rows)
        good = [row for row in rows if row.error is None]
        return Damage(
            lost=len(self._texts.keys() - times.keys()),
            doubled=sum(times.values()) - len(times),
            changed=sum(row.text != expected_text(f"Say {self._texts[row.id]}", MAX_TOKENS) for row in good),
            condemned=frozenset(row.id for row in rows if row.error is not None),
        )

    def change_metadata(self) -> None:
        """Commit a table property, as another writer would."""
        log = self.output / "_delta_log"
        metadata = [action["metaData"] for action in actions(self.output) if "metaData" in action][-1]
        metadata["configuration"]["somebody"] = "else"
        draft = self._directory / "commit.json"
        draft.write_text(json.dumps({"metaData": metadata}) + "\n")
        while True:
            with contextlib.suppress(FileExistsError):  # the job has just committed
                os.link(draft, log / f"{len(list(log.glob('*.json'))):020}.json")
                return
