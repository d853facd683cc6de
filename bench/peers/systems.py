"""Each system runs the whole table some times over. One call of ``measure`` is one process of its own.

A measurement's ``start_s`` is everything before the first row of the first timed run: imports, Spark, the engine's
start and a warm-up. ``seconds`` are the timed runs, from the table on disk to the outputs on disk.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from bench.peers.load import WARM_UP_ROWS, Load


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One system's figures."""

    start_s: float
    seconds: list[float]
    output_tokens: int
    """Of one run."""
    engines: int


def bare_engine(load: Load) -> Measurement:
    """The ceiling: all rows handed to the engine at once."""
    from pipemax.api import GenerationRequest, OfflineEngine, Sampling
    from pipemax.config import EngineConfig

    def requests(limit: int | None = None) -> list[GenerationRequest]:
        return [
            GenerationRequest(
                request_id=str(row["id"]),
                prompt=row["prompt"],
                sampling=Sampling(max_tokens=row["max_tokens"]),
            )
            for row in load.prompts(limit)
        ]

    begin_s = time.perf_counter()
    tokens = 0
    seconds = []
    with OfflineEngine(EngineConfig.parse(load.pipemax_engine())) as engine:
        list(engine.generate(requests(WARM_UP_ROWS)))
        start_s = time.perf_counter() - begin_s
        for _ in range(load.repeats):
            begin_s = time.perf_counter()
            completions = list(engine.generate(requests()))
            (Path(load.directory) / "bare.json").write_text(json.dumps([done.text for done in completions]))
            seconds.append(time.perf_counter() - begin_s)
            tokens = sum(done.completion_tokens for done in completions)
    return Measurement(start_s=start_s, seconds=seconds, output_tokens=tokens, engines=1)


def run_batch(load: Load) -> Measurement:
    """``vllm run-batch``: a command per table, so its start is the time of the same command with one row.

    It takes chats alone: a template that is the message itself makes them the prompts of the others.
    """
    seconds = [_run_batch(load, load.rows) for _ in range(load.repeats)]
    start_s = _run_batch(load, 1)
    lines = (Path(load.directory) / "batch-out.jsonl").with_suffix(f".{load.rows}").read_text().splitlines()
    usages = [json.loads(line)["response"]["body"]["usage"] for line in lines]
    return Measurement(
        start_s=start_s,
        seconds=[run_s - start_s for run_s in seconds],
        output_tokens=sum(usage["completion_tokens"] for usage in usages),
        engines=1,
    )


def _run_batch(load: Load, rows: int) -> float:
    directory = Path(load.directory)
    inputs, outputs = directory / "batch-in.jsonl", (directory / "batch-out.jsonl").with_suffix(f".{rows}")
    begin_s = time.perf_counter()
    with inputs.open("w") as file:
        for row in load.prompts(rows):
            body = {
                "model": load.model,
                "messages": [{"role": "user", "content": row["prompt"]}],
                "max_tokens": row["max_tokens"],
                "temperature": 0,
            }
            request = {
                "custom_id": str(row["id"]),
                "method": "POST",
                "url": "/v1/chat/completions",
                "body": body,
            }
            file.write(json.dumps(request) + "\n")
    template = directory / "as-it-is.jinja"
    template.write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    arguments = ["--chat-template", str(template)]
    for name, value in load.vllm_arguments().items():
        flag = "--" + name.replace("_", "-")
        arguments += [flag] if value is True else [flag, str(value)]
    command = [
        sys.executable,
        "-m",
        "vllm.entrypoints.openai.run_batch",
        "-i",
        str(inputs),
        "-o",
        str(outputs),
    ]
    subprocess.run([*command, *arguments], check=True, env=_on_all_cores(load), stdout=subprocess.DEVNULL)
    return time.perf_counter() - begin_s


def pipemax_spark(load: Load) -> Measurement:
    """``annotate()``: two slots that feed one engine server."""
    from pipemax_spark.annotate import annotate

    def transform(frame: Any) -> Any:
        annotated = annotate(
            frame.selectExpr("id", "prompt", "struct(max_tokens) AS overrides"),
            prompt_column="prompt",
            overrides_column="overrides",
            engine=load.pipemax_engine(),
        )
        return annotated.selectExpr("id", "annotation.text", "annotation.completion_tokens AS tokens")

    os.environ.update(_on_all_cores(load))
    return _measure_on_spark(load, slots=2, engines=1, partitions=8, transform=transform)


def plain_udf_one(load: Load) -> Measurement:
    """One Python worker with one engine on all cores."""
    return _measure_on_spark(
        load, slots=1, engines=1, partitions=1, transform=_plain_udf(load, pins_cores=False)
    )


def plain_udf_pinned(load: Load) -> Measurement:
    """A Python worker with an engine per core."""
    cores = len(load.cores)
    return _measure_on_spark(
        load, slots=cores, engines=cores, partitions=cores, transform=_plain_udf(load, pins_cores=True)
    )


def _plain_udf(load: Load, *, pins_cores: bool) -> Callable[[Any], Any]:
    from bench.peers.plain_udf import generate_with

    return lambda frame: frame.mapInArrow(
        generate_with(load, pins_cores=pins_cores), "id long, text string, tokens long"
    )


def _measure_on_spark(
    load: Load, *, slots: int, engines: int, partitions: int, transform: Callable[[Any], Any]
) -> Measurement:
    output = str(Path(load.directory) / "spark-out")
    begin_s = time.perf_counter()
    seconds = []
    with _spark(slots) as spark:
        frame = spark.read.parquet(load.table).repartition(partitions)
        transform(frame.limit(WARM_UP_ROWS).repartition(partitions)).write.mode("overwrite").parquet(output)
        start_s = time.perf_counter() - begin_s
        for _ in range(load.repeats):
            begin_s = time.perf_counter()
            transform(frame).write.mode("overwrite").parquet(output)
            seconds.append(time.perf_counter() - begin_s)
    answers = pq.read_table(output)
    assert sorted(answers["id"].to_pylist()) == list(range(load.rows)), "rows were lost or doubled"
    tokens = sum(answers["tokens"].to_pylist())
    return Measurement(start_s=start_s, seconds=seconds, output_tokens=tokens, engines=engines)


@contextmanager
def _spark(slots: int) -> Iterator[Any]:
    from pyspark.sql import SparkSession

    os.environ["PYSPARK_PYTHON"] = sys.executable
    builder = SparkSession.builder.master(f"local[{slots}]").config("spark.ui.enabled", "false")
    spark = builder.config("spark.sql.execution.arrow.maxRecordsPerBatch", "1000").getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    try:
        yield spark
    finally:
        spark.stop()


def _on_all_cores(load: Load) -> dict[str, str]:
    return os.environ | {"VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, load.cores))}


SYSTEMS: dict[str, Callable[[Load], Measurement]] = {
    "bare_engine": bare_engine,
    "pipemax_spark": pipemax_spark,
    "vllm_run_batch": run_batch,
    "plain_udf_one_engine": plain_udf_one,
    "plain_udf_pinned_engines": plain_udf_pinned,
}
