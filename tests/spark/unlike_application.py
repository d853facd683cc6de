"""Run a job on executors whose fake engines have unlike speeds, in an application of its own.

The job is as ``pipemax-annotate`` runs it, from a Delta table to a Delta table, on ``local-cluster``: Spark, tasks,
chunks, commits, spool and engine servers are real. An engine is a fake that needs time for each token.
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
ROWS_PER_S, TOKENS_PER_ROW = 40.0, 5
"""Of an engine of speed 1; the fake's answer is "reply to Say word 7"."""


@dataclass(frozen=True, kw_only=True)
class Engine:
    """What one engine did."""

    speed: float
    rows: int
    last_row_s: float
    """When it had done its last row, from the first report of any engine."""


def run_job(
    directory: Path,
    *,
    rows: int,
    speeds: Sequence[float],
    commit_every_s: float,
    room_rows: int,
    chunk_rows: int,
) -> dict[str, Any]:
    """Run the application in this process."""
    from rich.console import Console

    from pipemax.wire import GenerationSpec
    from pipemax_spark.job.annotation_job import AnnotationJob
    from pipemax_spark.options import JobOptions
    from pipemax_spark.report.terminal import Terminal
    from pipemax_spark.request.prompts import PromptSource
    from pipemax_spark.spark.session import get_session
    from tests.fakes.engine_python import write_engine_python
    from tests.fakes.settings import fake_config

    spark = get_session("unlike executors", log_dir=directory / "logs")
    source, output, claims = str(directory / "in"), str(directory / "out"), directory / "speeds"
    claims.mkdir()
    spark.range(rows).selectExpr("id", "concat('word ', id) AS text").write.format("delta").save(source)
    options = JobOptions(
        input=source,
        output=output,
        source=PromptSource(template="Say {text}"),
        engine=fake_config(
            max_num_seqs=16,
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
    slots: int,
    commit_every_s: float,
    room_rows: int,
    chunk_rows: int,
) -> subprocess.Popen[bytes]:
    """Start the application on ``nodes`` executors."""
    job = {
        "rows": rows,
        "speeds": list(speeds),
        "commit_every_s": commit_every_s,
        "room_rows": room_rows,
        "chunk_rows": chunk_rows,
    }
    return subprocess.Popen(
        [sys.executable, __file__, str(directory), json.dumps(job)],
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


if __name__ == "__main__":
    place = Path(sys.argv[1])
    (place / "outcome.json").write_text(json.dumps(run_job(place, **json.loads(sys.argv[2]))))
