"""The processes of ``lab/bench/virtual_overhead.py`` that run engines: one bare engine, or the Spark application."""

import argparse
import json
import sys
import threading
import time
import zlib
from collections import defaultdict
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from lab.bench.peers.load import REPOSITORY
from lab.bench.virtual_judge import Series

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pipemax.api import Completion, GenerationRequest, OfflineEngine

NODE, MODEL = "rtx5090x8", "llama2-70b"
ANSWERS, MOST_OUTPUT_TOKENS = REPOSITORY / "lab" / "bench" / "short_answers.yaml", 64
CHECKPOINT = REPOSITORY / "examples" / "model"
TEMPLATE = "Say {text}"
ROWS_AT_ONCE = 256


def engine(policy: str, stretch: float) -> dict[str, Any]:
    return {
        "model": str(CHECKPOINT),
        "policy": policy,
        "max_num_seqs": 512,
        "max_num_batched_tokens": 256,
        "virtual_node": {"node": NODE, "model": MODEL, "output_tokens": str(ANSWERS), "stretch": stretch},
    }


def checksum(ids: list[int], texts: list[str]) -> int:
    return sum(zlib.crc32(f"{number} {text}".encode()) for number, text in zip(ids, texts, strict=True))


def fed(engine: "OfflineEngine", requests: "Sequence[GenerationRequest]") -> "Iterator[Completion]":
    """Run all requests, sent as far as the engine has room for them, which is what a server does for its sessions."""
    engine.set_input_open(True)
    submitted = ended = 0
    while ended < len(requests):
        while submitted < len(requests) and engine.admission_credit_tokens() > 0:
            following = requests[submitted : submitted + ROWS_AT_ONCE]
            engine.submit(following)
            submitted += len(following)
            if submitted == len(requests):
                engine.set_input_open(False)
        completions = engine.poll(timeout_s=0.25)
        ended += len(completions)
        yield from completions


def bare_child(directory: Path, number: int, settings: dict[str, Any]) -> None:
    """Run one engine over its part of the rows."""
    from pipemax.api import GenerationRequest, OfflineEngine, Sampling
    from pipemax.config import EngineConfig

    series, ended = Series(), threading.Event()

    def sample() -> None:
        while not ended.wait(1.0):
            series.add(time.time(), engine.stats().metrics)

    with OfflineEngine(EngineConfig.parse(settings)) as engine:
        (directory / f"ready-{number}").touch()
        while not (directory / "go").exists():
            time.sleep(0.05)
        watcher = threading.Thread(target=sample)
        watcher.start()
        rows = pq.read_table(directory / "in" / f"part-{number}.parquet").to_pylist()
        requests = [
            GenerationRequest(
                request_id=str(row["id"]),
                prompt=TEMPLATE.format(text=row["text"]),
                sampling=Sampling(max_tokens=MOST_OUTPUT_TOKENS),
            )
            for row in rows
        ]
        done = list(fed(engine, requests))
        ids, texts = [int(completion.request_id) for completion in done], [c.text or "" for c in done]
        pq.write_table(pa.table({"id": ids, "text": texts}), directory / f"out-{number}.parquet")
        ended.set()
        watcher.join()
        series.add(time.time(), engine.stats().metrics)
    outcome = {"rows": len(ids), "distinct_ids": len(set(ids)), "checksum": checksum(ids, texts)}
    write(directory / f"bare-{number}.json", {**outcome, "series": [asdict(series)]})


def spark_child(directory: Path, settings: dict[str, Any], commit_every_s: float) -> None:
    """Run the application."""
    from rich.console import Console

    from pipemax.wire import GenerationSpec
    from pipemax_spark.job.annotation_job import AnnotationJob
    from pipemax_spark.job.options import JobOptions
    from pipemax_spark.monitor.terminal import Terminal
    from pipemax_spark.prompts import PromptSource
    from pipemax_spark.spark_session import get_session

    spark = get_session("spark overhead on virtual nodes", log_dir=directory / "logs")
    options = JobOptions(
        input=str(directory / "in"),
        input_format="parquet",
        output=str(directory / "out"),
        source=PromptSource(template=TEMPLATE),
        engine=settings,
        generation=GenerationSpec(max_tokens=MOST_OUTPUT_TOKENS),
        id_columns=("id",),
        commit_every=timedelta(seconds=commit_every_s),
        mlflow_experiment="",
        log_dir=directory / "logs",
    )
    job = AnnotationJob(spark, options, Terminal(Console(file=sys.stderr, width=160)))
    summary = job.run()
    assert summary is not None
    assert summary.virtual_node is not None, "the summary does not say that nothing was computed"
    out = spark.read.format("delta").load(str(directory / "out"))
    facts = out.selectExpr(
        "count(*) AS rows",
        "count(DISTINCT id) AS distinct_ids",
        "sum(crc32(encode(concat(id, ' ', annotation.text), 'UTF-8'))) AS checksum",
    ).first()
    reports = pq.read_table(options.driver_dir / "runs" / job.run_id / "engine_metrics.parquet").to_pylist()
    engines: dict[str, Series] = defaultdict(Series)
    for report in reports:
        engines[report["server_id"]].add(report["at"].timestamp(), dict(report["metrics"]))
    series = [asdict(series) for series in engines.values()]
    write(directory / "spark.json", {**facts.asDict(), "series": series})
    spark.stop()


def write(path: Path, value: object) -> None:
    draft = path.with_suffix(".draft")
    draft.write_text(json.dumps(value))
    draft.rename(path)


def main() -> None:
    parser = argparse.ArgumentParser(description="A process of spark_overhead.py --virtual.")
    parser.add_argument("--child", choices=("bare", "spark"), required=True)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--number", type=int, default=0)
    parser.add_argument("--policy", required=True)
    parser.add_argument("--stretch", type=float, required=True)
    parser.add_argument("--commit-every", type=float, required=True)
    arguments = parser.parse_args()
    settings = engine(arguments.policy, arguments.stretch)
    if arguments.child == "bare":
        bare_child(arguments.directory, arguments.number, settings)
    else:
        spark_child(arguments.directory, settings, arguments.commit_every)


if __name__ == "__main__":
    main()
