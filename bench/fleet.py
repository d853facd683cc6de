"""Run tables on small fleets of fake engines through Spark, and compare their hours with those that are predicted.

    python bench/fleet.py [--settings alone,pair,unlike,lost] [--seconds 240] [--json FILE]

The job is as ``pipemax-annotate`` runs it, from a Delta table to a Delta table, on ``local-cluster[NODES,4,1024]``:
Spark, tasks, chunks, commits, spool and engine servers are real. An engine is a fake that needs time: it starts in
10 s, answers 40 rows/s times its speed, has room for 164 rows, and keeps one row in twenty for 8 s. So its drain is
known, and ``pipemax.policy.fleet`` predicts the same table from these figures only. Where nodes are lost, executors
are killed at given times, and Spark starts others.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import psutil

from pipemax.policy.fleet import FleetRun, FleetSettings, NodeWork, run_fleet

REPOSITORY = Path(__file__).resolve().parents[1]
ROWS_PER_S = 40.0
TOKENS_PER_ROW = 5
"""The fake's answer, "reply to Say word 7"."""
ROOM_ROWS, CHUNK_ROWS = 100, 64
SLOW_ROW_S, SLOW_ROWS = 8.0, 20
"""One row in ``SLOW_ROWS`` takes at least this long, and holds up no other."""
LOAD_S = 10.0
COMMIT_EVERY_S = 20.0
SLOTS = 4
WORK = NodeWork(
    rows_per_s=ROWS_PER_S,
    drain_s=SLOW_ROW_S,
    drain_rows=ROOM_ROWS + CHUNK_ROWS,
    held_rows=ROOM_ROWS + CHUNK_ROWS,
)
SETTINGS = FleetSettings(start_up_s=LOAD_S, commit_every_s=COMMIT_EVERY_S, slots_per_node=SLOTS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One fleet."""

    nodes: int
    speed_spread: float = 0.0
    losses: tuple[float, ...] = ()
    """When executors are killed, as shares of ``--seconds`` from the first engine's start."""
    seed: int = 1


FLEETS = {
    "alone": Setting(nodes=1),
    "pair": Setting(nodes=2),
    "unlike": Setting(nodes=4, speed_spread=0.4),
    "lost": Setting(nodes=3, losses=(0.3, 0.6)),
}


@dataclass(frozen=True, kw_only=True)
class Engine:
    """What one engine did."""

    speed: float
    rows: int
    last_row_s: float
    """When it had done its last row, from the first report of any engine."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """One table, run and predicted."""

    fleet: str
    nodes: int
    rows: int
    rows_out: int
    distinct_ids: int
    seconds: float
    """From the start of the first engine to the last commit."""
    before_s: float
    """From the start of the first engine to the first report of one; the load, which takes 10 s, is in it."""
    after_s: float
    """From the last row to the last commit."""
    rows_s: float
    """From the first report of an engine to the last row: without start-up, and without Spark before and after."""
    predicted_rows_s: float
    predicted_s: float
    predicted_least_s: float
    predicted_most_s: float
    executors_killed: int
    engines: list[Engine]
    load_average: tuple[float, float, float]


def run_job(
    directory: Path,
    *,
    rows: int,
    speeds: Sequence[float],
    commit_every_s: float,
    slow_row_s: float,
    room_rows: int,
    chunk_rows: int,
) -> dict[str, Any]:
    """Run the application; this is called in a process of its own."""
    from rich.console import Console

    from pipemax.wire import GenerationSpec
    from pipemax_spark.job.annotation_job import AnnotationJob
    from pipemax_spark.job.options import JobOptions
    from pipemax_spark.monitor.terminal import Terminal
    from pipemax_spark.prompts import PromptSource
    from pipemax_spark.spark_session import get_session
    from tests.fakes.engine_python import write_engine_python
    from tests.fakes.settings import fake_config

    spark = get_session("fleet", log_dir=directory / "logs")
    source, output, claims = str(directory / "in"), str(directory / "out"), directory / "speeds"
    claims.mkdir()
    text = f"concat('word ', id, if(id % {SLOW_ROWS} = 7, ' [[slow {slow_row_s:g}]]', ''))"
    spark.range(rows).selectExpr("id", f"{text} AS text").write.format("delta").save(source)
    options = JobOptions(
        input=source,
        output=output,
        source=PromptSource(template="Say {text}"),
        engine=fake_config(
            max_num_seqs=16,
            load_s=LOAD_S,
            tokens_per_s=ROWS_PER_S * TOKENS_PER_ROW,
            speeds=list(speeds),
            speed_claims=str(claims),
            room_rows=room_rows,
        ),
        generation=GenerationSpec(max_tokens=TOKENS_PER_ROW),
        engine_python=write_engine_python(directory / "engine-python", f"--chunk-rows={chunk_rows}"),
        id_columns=("id",),
        commit_every=timedelta(seconds=commit_every_s),
        log_dir=directory / "logs",
        work_dir=str(directory / "work-dir"),
    )
    summary = AnnotationJob(spark, options, Terminal(Console(file=sys.stderr, width=120))).run()
    assert summary is not None
    done = spark.read.format("delta").load(output).where("annotation.error IS NULL").select("id")
    outcome = {**asdict(summary), "distinct_ids": done.distinct().count()}
    spark.stop()
    return outcome


def launch(
    directory: Path,
    *,
    rows: int,
    nodes: int,
    speeds: Sequence[float],
    slots: int = SLOTS,
    commit_every_s: float = COMMIT_EVERY_S,
    slow_row_s: float = SLOW_ROW_S,
    room_rows: int = ROOM_ROWS,
    chunk_rows: int = CHUNK_ROWS,
) -> subprocess.Popen[bytes]:
    """Start the application on ``nodes`` executors."""
    job = {
        "rows": rows,
        "speeds": list(speeds),
        "commit_every_s": commit_every_s,
        "slow_row_s": slow_row_s,
        "room_rows": room_rows,
        "chunk_rows": chunk_rows,
    }
    return subprocess.Popen(
        [sys.executable, __file__, "--run", str(directory), "--job", json.dumps(job)],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "engine")]),
            "PYSPARK_SUBMIT_ARGS": f"--master local-cluster[{nodes},{slots},1024] --conf spark.executor.memory=640m "
            "--conf spark.driver.memory=1g --conf spark.ui.enabled=false "
            "--conf spark.sql.shuffle.partitions=2 --conf spark.databricks.delta.snapshotPartitions=2 "
            "--conf spark.task.maxFailures=16 --conf spark.stage.maxConsecutiveAttempts=16 pyspark-shell",
            "PIPEMAX_LOG_DIR": str(directory / "logs"),
            "SPARK_WORKER_DIR": str(directory / "work"),
        },
    )


def outcome_of(directory: Path) -> dict[str, Any]:
    """Return the summary of an application that has ended. Raise ``SystemExit`` if it failed."""
    path = directory / "outcome.json"
    if not path.exists():
        raise SystemExit(f"the application failed; logs: {directory / 'logs'}")
    outcome: dict[str, Any] = json.loads(path.read_text())
    return outcome


def seconds_of(directory: Path) -> float:
    """Return the seconds from the start of the first engine to the last commit, by the files that they made."""
    last_commit_s = max(log.stat().st_mtime for log in (directory / "out" / "_delta_log").glob("*.json"))
    return last_commit_s - _first_start_s(directory)


def _first_claim(directory: Path) -> Path:
    """Return what an engine makes when it claims the first speed, at the end of its load."""
    return directory / "speeds" / "0"


def _first_start_s(directory: Path) -> float:
    """Return when the first engine began to load, in seconds since the epoch."""
    return _first_claim(directory).stat().st_mtime - LOAD_S


def reports_of(directory: Path) -> list[dict[str, Any]]:
    """Return all reports of all engines."""
    import pyarrow.parquet as pq

    (path,) = (directory / "runs").rglob("engine_metrics.parquet")
    reports: list[dict[str, Any]] = pq.read_table(path).to_pylist()
    return reports


def engines_of(reports: Sequence[dict[str, Any]]) -> list[Engine]:
    """Return what each engine reported, the fastest first."""
    first = min(report["at"] for report in reports)
    engines = []
    for server in {report["server_id"] for report in reports}:
        own = sorted((r for r in reports if r["server_id"] == server), key=lambda report: report["at"])
        rows = max(report["rows_done"] for report in own)
        last = next(report["at"] for report in own if report["rows_done"] == rows)
        speed = max(dict(report["metrics"]).get("speed", 0.0) for report in own)
        engines.append(Engine(speed=speed, rows=rows, last_row_s=(last - first).total_seconds()))
    return sorted(engines, key=lambda engine: -engine.speed)


class Killer(threading.Thread):
    """Kills executors of the application at these times from the start of the first engine, until stopped."""

    def __init__(self, directory: Path, losses_s: Sequence[float], seed: int) -> None:
        super().__init__()
        self._directory, self._losses_s = directory, losses_s
        self._rng = np.random.default_rng(seed)
        self.stopped = threading.Event()
        self.killed = 0

    def run(self) -> None:
        if not self._losses_s:
            return
        while not _first_claim(self._directory).exists():
            if self.stopped.wait(0.5):
                return
        begin_s = _first_start_s(self._directory)
        for loss_s in self._losses_s:
            if self.stopped.wait(max(0.0, begin_s + loss_s - time.time())):
                return
            if executors := self._executors():
                os.kill(executors[self._rng.integers(len(executors))].pid, signal.SIGKILL)
                self.killed += 1

    def _executors(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            try:
                is_executor = "CoarseGrainedExecutorBackend" in " ".join(process.cmdline())
                if is_executor and str(self._directory) in process.environ().get("PIPEMAX_LOG_DIR", ""):
                    found.append(process)
            except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
                continue  # it ended meanwhile
        return found


def measure(name: str, setting: Setting, seconds: float, directory: Path) -> Result:
    """Run one fleet. Raise ``SystemExit`` if the application fails."""
    rows = int(setting.nodes * ROWS_PER_S * seconds)
    speeds = _speeds(setting)
    losses_s = [share * seconds for share in setting.losses]
    killer = Killer(directory, losses_s, setting.seed)
    application = launch(directory, rows=rows, nodes=setting.nodes, speeds=speeds)
    killer.start()
    application.wait()
    killer.stopped.set()
    killer.join()
    outcome = outcome_of(directory)
    run, reports = predict(rows, setting, losses_s), reports_of(directory)
    engines, whole_s = engines_of(reports), seconds_of(directory)
    rows_s = max(engine.last_row_s for engine in engines)
    before_s = min(report["at"] for report in reports).timestamp() - _first_start_s(directory)
    return Result(
        fleet=name,
        nodes=setting.nodes,
        rows=rows,
        rows_out=outcome["rows_out"],
        distinct_ids=outcome["distinct_ids"],
        seconds=round(whole_s, 1),
        before_s=round(before_s, 1),
        after_s=round(whole_s - before_s - rows_s, 1),
        rows_s=round(rows_s, 1),
        predicted_rows_s=round(3600 * run.hours - SETTINGS.start_up_s - SETTINGS.commit_s, 1),
        predicted_s=round(3600 * run.hours, 1),
        predicted_least_s=round(3600 * run.least_hours, 1),
        predicted_most_s=round(3600 * run.most_hours, 1),
        executors_killed=killer.killed,
        engines=engines,
        load_average=os.getloadavg(),
    )


def predict(rows: int, setting: Setting, losses_s: Sequence[float]) -> FleetRun:
    """Predict the fleet's run from the fake engine's figures."""
    settings = replace(SETTINGS, speed_spread=setting.speed_spread)
    return run_fleet(rows, setting.nodes, WORK, settings, losses_s=losses_s)


def _speeds(setting: Setting) -> list[float]:
    """Return log-normal speeds in even quantiles, with mean 1 and the setting's spread."""
    quantiles = [(number + 0.5) / setting.nodes for number in range(setting.nodes)]
    deviates = np.array([NormalDist().inv_cdf(quantile) for quantile in quantiles])
    if setting.speed_spread == 0:
        return [1.0] * setting.nodes
    speeds = np.exp(deviates * np.sqrt(np.log(1 + setting.speed_spread**2)))
    return [round(float(speed), 3) for speed in speeds / speeds.mean()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--settings", default=",".join(FLEETS), help=f"of {', '.join(FLEETS)}")
    parser.add_argument("--seconds", type=float, default=240.0, help="of work for each node")
    parser.add_argument("--json", type=Path, help="write the results here, too")
    parser.add_argument("--run", type=Path, help=argparse.SUPPRESS)  # this process is the application
    parser.add_argument("--job", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.run:
        outcome = run_job(arguments.run, **json.loads(arguments.job))
        (arguments.run / "outcome.json").write_text(json.dumps(outcome))
        return
    results = []
    for name in arguments.settings.split(","):
        with tempfile.TemporaryDirectory() as directory:
            begin_s = time.monotonic()
            results.append(asdict(measure(name, FLEETS[name], arguments.seconds, Path(directory))))
        print(json.dumps(results[-1]), f"after {time.monotonic() - begin_s:.0f} s", flush=True)
        if arguments.json:
            arguments.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
