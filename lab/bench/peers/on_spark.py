"""Systems on Spark: a Parquet table in, a Parquet table out, one Spark session and its engines for all runs.

All have as many partitions as task slots, so that none ends its part of the rows, and drains the engine, more often.
"""

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from lab.bench.peers.load import LOGS, WARM_UP_ROWS, Load
from lab.bench.peers.recorder import Recorder, tokens_by_id


def annotated(
    load: Load, frame: Any, *, seed: int, log_dir: str | None = None, engine_python: str | None = None
) -> Any:
    """Return the load's rows annotated by ``annotate()``.

    A seed changes nothing about greedy answers, but requests with another seed are others: give each run its own, or
    the engine server answers it from its cache.
    """
    from pipemax_spark import annotate

    return annotate(
        frame.selectExpr("id", "prompt", f"struct(max_tokens, {seed}L AS seed) AS overrides"),
        prompt_column="prompt",
        overrides_column="overrides",
        engine=load.pipemax_engine(),
        log_dir=log_dir,
        engine_python=engine_python,
    )


def pipemax_spark(load: Load, recorder: Recorder) -> None:
    """Run ``annotate()``, with two slots that feed one engine server."""
    seeds = count(1)

    def transform(frame: Any) -> Any:
        answers = annotated(load, frame, seed=next(seeds), log_dir=str(LOGS))
        return answers.selectExpr("id", "annotation.text", "annotation.completion_tokens AS tokens")

    _measure(load, recorder, slots=2, transform=transform)


def plain_udf_one_engine(load: Load, recorder: Recorder) -> None:
    """Run one Python worker with one engine on all cores."""
    _measure(load, recorder, slots=1, transform=_plain_udf(load, pins_cores=False))


def plain_udf_pinned_engines(load: Load, recorder: Recorder) -> None:
    """Run one Python worker with an engine for each core."""
    cores = len(load.cores)
    _measure(load, recorder, slots=cores, transform=_plain_udf(load, pins_cores=True))


def distribatch(load: Load, recorder: Recorder) -> None:
    """Run distribatch's Spark backend, with one Python worker and one engine on all cores."""
    from lab.bench.peers.distribatch_job import make_job

    job = make_job(load)

    def transform(frame: Any) -> Any:
        answered = job.run(frame, backend="spark", output_col="answer", batch_size=load.batch_rows)
        return answered.selectExpr("id", "answer AS text", "answer_meta.completion_tokens AS tokens")

    _measure(load, recorder, slots=1, transform=transform)


def _plain_udf(load: Load, *, pins_cores: bool) -> Callable[[Any], Any]:
    from lab.bench.peers.plain_udf import generate_with

    generate = generate_with(load, pins_cores=pins_cores)
    return lambda frame: frame.mapInArrow(generate, "id long, text string, tokens long")


def _measure(load: Load, recorder: Recorder, *, slots: int, transform: Callable[[Any], Any]) -> None:
    output = str(Path(load.directory) / "spark-out")
    begin_s = time.perf_counter()
    with _spark(load, slots) as spark:
        frame = spark.read.parquet(load.table).repartition(slots)
        transform(frame.limit(WARM_UP_ROWS).repartition(slots)).write.mode("overwrite").parquet(output)
        recorder.started(time.perf_counter() - begin_s)
        for _ in range(load.repeats):
            begin_s = time.perf_counter()
            transform(frame).write.mode("overwrite").parquet(output)
            run_s = time.perf_counter() - begin_s
            recorder.ran(run_s, tokens_by_id(pq.read_table(output)))


@contextmanager
def _spark(load: Load, slots: int) -> Iterator[Any]:
    from pyspark.sql import SparkSession

    os.environ["PYSPARK_PYTHON"] = sys.executable
    settings = {
        "spark.ui.enabled": "false",
        # Whole batches of the plain UDF and of distribatch, so that none of them drains the engine early.
        "spark.sql.execution.arrow.maxRecordsPerBatch": str(16 * load.batch_rows),
        # As outside Spark; Spark would give its Python workers one OpenMP thread each.
        "spark.executorEnv.OMP_NUM_THREADS": str(len(load.cores)),
    }
    spark = SparkSession.builder.master(f"local[{slots}]").config(map=settings).getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    try:
        yield spark
    finally:
        spark.stop()
