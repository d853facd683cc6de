"""``make faults CASCADE=1``: kill a job with ``--cascade`` at random points of all its phases, and look at its end.

python -m tests.spark.faults.cascade_kills [--kills 20] [--seed N]: exit status 1 if a record has changed, a row was
lost or doubled, or a kept answer is not the stored one of the small model. Each kill is SIGKILL of the whole job,
driver and JVM; its engine ends with them. Then the same command is run again.
"""

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from tests.fakes.engine_python import write_engine_python
from tests.fakes.settings import fake_config
from tests.spark.delta_log import committed_files
from tests.spark.processes import SMALL_SPARK, servers_of
from tests.waiting import wait_until

REPOSITORY = Path(__file__).resolve().parents[3]
ROWS = 6_000
"""Enough for a pilot."""
_SAID = {
    "small pass": "1 of 3, the small model",
    "pilot": "first, the large model",
    "labels": "2 of 3, the large model",
    "asked again": "again, the large model",
    "filling": "3 of 3.",
}
"""How the job begins to say in which phase it is."""
PHASES = ("start", *_SAID)
_LONGEST_WAIT_S = 20.0
"""A kill comes at most so long after its phase has begun."""
_PHASE_S = 600.0


def read(table: Path) -> list[dict[str, Any]]:
    """Return the rows of a Delta table, past Spark; none of a table that is not there."""
    if not (table / "_delta_log").exists():
        return []
    return [row for file in committed_files(table) for row in pq.read_table(file).to_pylist()]


class KilledCascade:
    """A job with a cascade in a directory of its own, its kills and its records."""

    def __init__(self, directory: Path, seed: int) -> None:
        self._directory = directory
        self._output = directory / "out"
        self._logs = directory / "logs"
        self._rng = random.Random(seed)
        self.killed = Counter[str]()
        self._log = self._logs / "driver.log"
        self._log_before = 0
        self.records: dict[str, str] = {}
        """Each as it was first seen."""
        self.faults: list[str] = []
        self.kept = 0
        self._logs.mkdir(parents=True)
        rows = pa.table({"id": range(ROWS), "text": [f"shop sells item {row}" for row in range(ROWS)]})
        pq.write_table(rows, directory / "in.parquet")
        hold = directory / "hold"
        hold.touch()
        for name, options in (("fake", {}), ("fake-small", {"errs": 0.2})):
            slow = fake_config(name, held_by=str(hold), held_row_s=0.01, **options)
            (directory / f"{name}.yaml").write_text(yaml.safe_dump(slow))
        self._engine_python = write_engine_python(directory / "python")

    def start(self) -> subprocess.Popen[bytes]:
        choices = [word for choice in ("bread", "cheese", "fruit", "nuts") for word in ("--choice", choice)]
        with self._log.open("ab") as log:
            self._log_before = log.tell()
            return subprocess.Popen(
                [
                    *(sys.executable, REPOSITORY / "jobs" / "annotate.py"),
                    *("--input", self._directory / "in.parquet", "--output", self._output),
                    *("--template", "Say {text}", "--id-columns", "id", *choices),
                    *(
                        "--engine",
                        self._directory / "fake.yaml",
                        "--cascade",
                        self._directory / "fake-small.yaml",
                    ),
                    *("--agree", "0.9", "--commit-every", "2s", "--mlflow-experiment", ""),
                    *("--engine-python", self._engine_python, "--log-dir", self._logs),
                ],
                env={**os.environ, "PYSPARK_SUBMIT_ARGS": f"--master local[4] {SMALL_SPARK} pyspark-shell"},
                start_new_session=True,
                stdout=log,
                stderr=log,
            )

    def kill_in(self, phase: str) -> None:
        """Run the job, and kill it at a random moment of this phase, or of a later one if that is over."""
        job = self.start()
        try:
            if phase != PHASES[0]:
                later = PHASES[PHASES.index(phase) :]
                wait_until(lambda: self.phase() in later or job.poll() is not None, _PHASE_S, phase)
            end_s = time.monotonic() + self._rng.uniform(0, _LONGEST_WAIT_S)
            while time.monotonic() < end_s and job.poll() is None:
                time.sleep(0.02)
            if job.poll() is None:
                self.killed[self.phase()] += 1
        finally:
            if job.poll() is None:
                os.killpg(job.pid, signal.SIGKILL)
            job.wait()
        wait_until(lambda: not servers_of(self._logs), 120, "the killed job's engine ends")
        self.look()

    def finish(self) -> None:
        """Run the job until it ends by itself, and look at what it has left."""
        if (status := self.start().wait(_PHASE_S)) != 0:
            self.faults.append(f"the last run ended with status {status}")
        self.look()
        rows = read(self._output)
        times = Counter(row["id"] for row in rows)
        lost, doubled = ROWS - len(times), len(rows) - len(times)
        if lost or doubled:
            self.faults.append(f"{lost} rows are lost, {doubled} doubled")
        small = {row["id"]: row["annotation"]["text"] for row in read(self._epoch / "small")}
        answers = {row["id"]: row["annotation"] for row in rows}
        self.kept = sum(row["model"] == "fake-small" for row in answers.values())
        if not self.kept:
            self.faults.append("no row keeps the small answer")
        if other := sum(
            row["text"] != small[key] for key, row in answers.items() if row["model"] == "fake-small"
        ):
            self.faults.append(f"{other} kept answers are not the stored ones")

    @property
    def _epoch(self) -> Path:
        return next(self._output.glob("_pipemax/*/cascade/*/1"), self._output / "no epoch")

    def look(self) -> None:
        """Compare the records with what they were."""
        for record in read(self._epoch / "records"):
            first = self.records.setdefault(record["name"], record["text"])
            if first != record["text"]:
                self.faults.append(f"the record {record['name']} has changed")

    def phase(self) -> str:
        """Return the phase in which the run is, by what it has said."""
        with self._log.open("rb") as log:
            log.seek(self._log_before)
            said = log.read().decode(errors="replace")
        places = {phase: said.rfind(words) for phase, words in _SAID.items()}
        latest = max(places, key=lambda phase: places[phase])
        return latest if places[latest] >= 0 else PHASES[0]


def strike(directory: Path, kills: int, seed: int) -> KilledCascade:
    """Kill a job so often, in each phase about as often as in any other, and let it end."""
    job = KilledCascade(directory, seed)
    for number in range(kills):
        job.kill_in(PHASES[number * len(PHASES) // kills])
    job.finish()
    return job


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1_000_000))
    options = parser.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="pipemax-cascade-kills-"))
    print(f"seed {options.seed}; logs in {directory}", flush=True)
    job = strike(directory, options.kills, options.seed)
    phases = ", ".join(f"{number} in '{phase}'" for phase, number in job.killed.items())
    print(f"killed {job.killed.total()} times: {phases}. Records: {', '.join(sorted(job.records))}")
    print(f"{job.kept:,} of {ROWS:,} rows keep the small answer")
    for fault in job.faults:
        print(fault)
    sys.exit(1 if job.faults else 0)


if __name__ == "__main__":
    main()
