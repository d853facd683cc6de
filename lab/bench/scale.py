"""Run a million short rows through two executors: rows per second, and the memory of every process over time.

    python lab/bench/scale.py [--rows 1000000] [--commit-every 60] [--json FILE] [--plot FILE]

The job is as ``pipemax-annotate`` runs it, from a Delta table to a Delta table, on ``local-cluster[2,1,2048]``. The
engine servers are real, around a fake engine that answers at once. So the rate is that of Spark, the servers and the
transport, and the memory is theirs: none of it may grow with the rows.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

import psutil

REPOSITORY = Path(__file__).resolve().parents[2]
SAMPLE_PERIOD_S = 1.0
KINDS = {
    "engine server": "pipemax.serve",
    "executor JVM": "CoarseGrainedExecutorBackend",
    "tasks' Python": "pyspark.daemon",
    "driver JVM": "org.apache.spark.deploy.SparkSubmit",
    "driver Python": "--run",
}
"""Kind of process → a part of its command line."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """One run."""

    rows: int
    rows_out: int
    distinct_ids: int
    engines: int
    seconds: float
    """Seconds of the job's chunks, engine start included."""
    rows_per_s: float
    peak_mib: dict[str, float]
    """Kind of process → peak resident memory of all its processes together."""
    growth: dict[str, float]
    """Kind → its median in the last quarter of the time with engines, divided by that in the second: 1 is flat."""
    load_average: tuple[float, float, float]
    """The machine's load average when the run had ended."""


@dataclass(slots=True)
class Memory:
    """Resident memory by kind of process, sampled until stopped."""

    mark: str
    """A part of the command line or the environment of every process that counts."""
    seconds: list[float] = field(default_factory=list)
    mib: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    stopped: threading.Event = field(default_factory=threading.Event)

    def watch(self) -> None:
        begin_s = time.monotonic()
        while not self.stopped.wait(SAMPLE_PERIOD_S):
            self.seconds.append(time.monotonic() - begin_s)
            now = self._resident_mib()
            for kind in KINDS:
                self.mib[kind].append(now.get(kind, 0.0))

    def growth(self, kind: str) -> float:
        """Return the median in the last quarter divided by that in the second.

        The quarters are of the time in which rows are annotated, that is, an engine server exists. Raise
        ``SystemExit`` if the run is too short.
        """
        rows = [mib for mib, server in zip(self.mib[kind], self.mib["engine server"], strict=True) if server]
        quarter = len(rows) // 4
        if quarter == 0:
            raise SystemExit(f"the run is too short to say anything of memory: {len(rows)} samples")
        return median(rows[-quarter:]) / median(rows[quarter : 2 * quarter])

    def _resident_mib(self) -> dict[str, float]:
        total: dict[str, float] = defaultdict(float)
        for process in psutil.process_iter():
            try:
                command = " ".join(process.cmdline())
                kind = next((kind for kind, part in KINDS.items() if part in command), None)
                if (
                    kind is not None
                    and process.environ().get("PIPEMAX_LOG_DIR", command).find(self.mark) >= 0
                ):
                    total[kind] += process.memory_info().rss / 2**20
            except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
                continue  # it ended meanwhile
        return total


def run_job(directory: Path, rows: int, commit_every_s: float) -> dict[str, Any]:
    """Run the application; this is called in a process of its own."""
    from rich.console import Console

    from pipemax.wire import GenerationSpec
    from pipemax_spark.job.annotation_job import AnnotationJob
    from pipemax_spark.options import JobOptions
    from pipemax_spark.report.terminal import Terminal
    from pipemax_spark.request.prompts import PromptSource
    from pipemax_spark.spark.session import get_session
    from tests.fakes.engine_python import write_engine_python
    from tests.fakes.settings import fake_config

    spark = get_session("scale", log_dir=directory / "logs")
    source, output = str(directory / "in"), str(directory / "out")
    spark.range(rows).selectExpr("id", "concat('word ', id) AS text").write.format("delta").save(source)
    options = JobOptions(
        input=source,
        output=output,
        source=PromptSource(template="Say {text}"),
        engine=fake_config(max_num_seqs=1024),
        generation=GenerationSpec(max_tokens=8),
        engine_python=write_engine_python(directory / "engine-python"),
        id_columns=("id",),
        commit_every=timedelta(seconds=commit_every_s),
        log_dir=directory / "logs",
    )
    summary = AnnotationJob(spark, options, Terminal(Console(file=sys.stderr, width=120))).run()
    assert summary is not None
    ids = spark.read.format("delta").load(output).where("annotation.error IS NULL").select("id")
    outcome = {**asdict(summary), "distinct_ids": ids.distinct().count()}
    spark.stop()
    return outcome


def measure(rows: int, commit_every_s: float, directory: Path) -> tuple[Result, Memory]:
    """Run the application and watch it from outside. Raise ``SystemExit`` if it fails."""
    memory = Memory(mark=str(directory))
    watcher = threading.Thread(target=memory.watch)
    command = [sys.executable, __file__, "--run", directory, "--rows", str(rows)]
    watcher.start()
    try:
        done = subprocess.run(
            [*command, "--commit-every", str(commit_every_s)],
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "engine")]),
                "PYSPARK_SUBMIT_ARGS": "--master local-cluster[2,1,2048] --conf spark.executor.memory=1g "
                "--conf spark.driver.memory=1g pyspark-shell",
                "PIPEMAX_LOG_DIR": str(directory / "logs"),
                "SPARK_WORKER_DIR": str(directory / "work"),
            },
            check=False,
        )
    finally:
        memory.stopped.set()
        watcher.join()
    if done.returncode:
        raise SystemExit(f"the application ended with {done.returncode}; logs: {directory / 'logs'}")
    outcome = json.loads((directory / "outcome.json").read_text())
    result = Result(
        rows=rows,
        rows_out=outcome["rows_out"],
        distinct_ids=outcome["distinct_ids"],
        engines=outcome["engines"],
        seconds=outcome["seconds"],
        rows_per_s=outcome["rows_per_s"],
        peak_mib={kind: round(max(memory.mib[kind])) for kind in KINDS},
        growth={kind: round(memory.growth(kind), 3) for kind in KINDS},
        load_average=os.getloadavg(),
    )
    return result, memory


def plot(result: Result, memory: Memory, path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    for kind in KINDS:
        axes.plot(memory.seconds, memory.mib[kind], label=f"{kind}: {result.growth[kind]:.2f}")
    axes.set(
        xlabel="seconds since the application was started",
        ylabel="resident memory, MiB",
        title=f"{result.rows:,} rows, {result.engines} engine servers, {result.rows_per_s:,.0f} rows/s",
        ylim=(0, None),
    )
    axes.legend(title="last quarter over second", fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--commit-every", type=float, default=60.0, help="seconds between two commits")
    parser.add_argument("--json", type=Path, help="write the result here, too")
    parser.add_argument("--plot", type=Path, help="draw memory over time")
    parser.add_argument("--run", type=Path, help=argparse.SUPPRESS)  # this process is the application
    arguments = parser.parse_args()
    if arguments.run:
        outcome = run_job(arguments.run, arguments.rows, arguments.commit_every)
        (arguments.run / "outcome.json").write_text(json.dumps(outcome))
        return
    with tempfile.TemporaryDirectory() as directory:
        result, memory = measure(arguments.rows, arguments.commit_every, Path(directory))
    if arguments.plot:
        plot(result, memory, arguments.plot)
    if arguments.json:
        arguments.json.write_text(json.dumps(asdict(result), indent=1) + "\n")
    print(json.dumps(asdict(result), indent=1))


if __name__ == "__main__":
    main()
