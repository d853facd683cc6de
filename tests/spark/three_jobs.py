"""An application of three jobs, run by ``test_cluster`` as a process of its own: a JVM has one Spark context.

During the third job, an executor is killed. python -m tests.spark.three_jobs DIRECTORY ENGINE_PYTHON: prints one JSON
object a job.
"""

import json
import os
import signal
import sys
import threading
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from pipemax.wire import GenerationSpec
from pipemax_spark.job.annotation_job import AnnotationJob
from pipemax_spark.options import JobOptions
from pipemax_spark.report.terminal import Terminal
from pipemax_spark.request.prompts import PromptSource
from pipemax_spark.spark.session import get_session
from tests.fakes.settings import fake_config
from tests.spark.processes import processes_with, servers_of
from tests.waiting import wait_until

ROWS = 400


def visible_devices(pid: int) -> str | None:
    variables = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
    return dict(variable.split("=", 1) for variable in variables if variable).get("CUDA_VISIBLE_DEVICES")


def kill_an_executor(spark: Any, output: Path) -> None:
    """Kill one when tasks have completed rows of the job with this output."""
    spool = output / "_pipemax"
    wait_until(lambda: any(spool.glob("*/*/spool/*/part-*/*.parquet")), 120, "rows are completed")
    executors = processes_with("CoarseGrainedExecutorBackend", spark.sparkContext.applicationId)
    os.kill(executors.pop().pid, signal.SIGKILL)


def main(directory: Path, engine_python: str) -> None:
    spark = get_session("three jobs", log_dir=directory / "logs")
    source = str(directory / "in.parquet")
    spark.range(ROWS).selectExpr("id", "concat('word ', id) AS text").write.parquet(source)
    for number in range(3):
        output = directory / f"out{number}"
        options = JobOptions(
            input=source,
            output=str(output),
            source=PromptSource(template="Say {text}"),
            # Slow enough that one executor cannot do it all before the other has begun.
            engine=fake_config(load_s=1.0, tokens_per_s=200),
            generation=GenerationSpec(max_tokens=8),
            engine_python=engine_python,
            id_columns=("id",),
            log_dir=directory / "logs",
        )
        striker = threading.Thread(target=kill_an_executor, args=(spark, output))
        if number == 2:
            striker.start()
        summary = AnnotationJob(spark, options, Terminal(Console(file=sys.stderr))).run()
        assert summary is not None
        is_struck = number == 2 and not striker.is_alive()
        servers = sorted(server.pid for server in servers_of(engine_python))
        gpus = [visible_devices(server) for server in servers]
        print(
            json.dumps({**asdict(summary), "servers": servers, "gpus": gpus, "is_struck": is_struck}),
            flush=True,
        )
    spark.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
