"""The Spark path's tokens per second over the bare engine's: the demo model, the same prompts, the same settings.

    python bench/spark_overhead.py [--json FILE] [--repeats 3] [--copies 3]

Both engines are started and warmed up first, which is reported apart. Then the repeats, the bare engine and Spark in
turn, so that what else the machine does meets both: from a Parquet file to a Parquet file, and from there by
``annotate()`` to a Delta table. ``ratio_to_bare_engine`` is the median of the turns' ratios.
"""

import argparse
import json
import os
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from pipemax.api import GenerationRequest, OfflineEngine, Sampling
from pipemax.config import EngineConfig
from pipemax_spark.annotate import annotate
from pipemax_spark.session import get_session

REPOSITORY = Path(__file__).resolve().parents[1]
TEMPLATE = "Package: {package}\nSummary: {summary}\nDescription: {description}"
MAX_TOKENS = 24
WARM_UP_ROWS = 64
ENGINE = {
    "model": str(REPOSITORY / "examples" / "model"),
    "dtype": "float32",  # so that both write the same tokens, whatever is in a batch
    "max_model_len": 512,
    "max_num_seqs": 64,
    "cpu_kv_gib": 0.5,
    "enable_prefix_caching": False,  # else the later turns would find what the earlier ones left
}


@dataclass(frozen=True, kw_only=True)
class Run:
    """One pass over the table."""

    seconds: float
    tokens: int
    texts: Counter[str]

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


@dataclass(frozen=True, kw_only=True)
class Result:
    """Rates count output tokens."""

    ratio_to_bare_engine: float
    ratios: list[float]
    bare_tokens_per_s: list[float]
    spark_tokens_per_s: list[float]
    rows: int
    tokens: int
    bare_start_s: float
    spark_start_s: float
    """Until the warm-up's rows were there: Spark, checks and engine."""
    texts_identical: bool
    cores: int
    load_average: tuple[float, float, float]
    """Of the machine, when the last run had ended."""


def write_table(path: Path, copies: int) -> int:
    """The demo table so many times; its number of rows."""
    table = pq.read_table(REPOSITORY / "examples" / "data" / "debian_packages.parquet")
    table = pa.concat_tables([table] * copies)
    # Row groups, so that Spark can give each slot its share.
    pq.write_table(table, path, row_group_size=-(-table.num_rows // 8))
    return int(table.num_rows)


def run_bare(engine: OfflineEngine, table: Path, output: Path, limit: int | None = None) -> Run:
    begin_s = time.perf_counter()
    rows = pq.read_table(table).slice(0, limit).to_pylist()
    sampling = Sampling(max_tokens=MAX_TOKENS)
    requests = [
        GenerationRequest(request_id=str(i), prompt=TEMPLATE.format(**row), sampling=sampling)
        for i, row in enumerate(rows)
    ]
    completions = list(engine.generate(requests))
    texts = [done.text for done in completions]
    pq.write_table(pa.table({"text": texts}), output)
    seconds = time.perf_counter() - begin_s
    return Run(
        seconds=seconds, tokens=sum(done.completion_tokens for done in completions), texts=Counter(texts)
    )


def run_spark(annotated: Any, output: Path) -> Run:
    begin_s = time.perf_counter()
    annotated.write.format("delta").mode("overwrite").save(str(output))
    seconds = time.perf_counter() - begin_s
    written = annotated.sparkSession.read.format("delta").load(str(output))
    rows = written.select("annotation.text", "annotation.completion_tokens").collect()
    return Run(
        seconds=seconds,
        tokens=sum(row["completion_tokens"] for row in rows),
        texts=Counter(row["text"] for row in rows),
    )


@contextmanager
def spark_session(directory: Path) -> Iterator[Any]:
    os.environ["PYSPARK_SUBMIT_ARGS"] = (
        "--master local[2] --conf spark.sql.files.maxPartitionBytes=262144 pyspark-shell"
    )
    spark = get_session("spark overhead", log_dir=directory / "logs")
    try:
        yield spark
    finally:
        spark.stop()


def compare(repeats: int, copies: int, directory: Path) -> Result:
    table = directory / "in.parquet"
    rows = write_table(table, copies)
    begin_s = time.perf_counter()
    with OfflineEngine(EngineConfig.parse(ENGINE)) as engine:
        run_bare(engine, table, directory / "bare.parquet", WARM_UP_ROWS)
        bare_start_s = time.perf_counter() - begin_s
        begin_s = time.perf_counter()
        with spark_session(directory) as spark:
            annotated = annotate(
                spark.read.parquet(str(table)), template=TEMPLATE, engine=ENGINE, max_tokens=MAX_TOKENS
            )
            run_spark(annotated.limit(WARM_UP_ROWS), directory / "out")
            spark_start_s = time.perf_counter() - begin_s
            turns = []
            for _ in range(repeats):
                bare = run_bare(engine, table, directory / "bare.parquet")
                turns.append((bare, run_spark(annotated, directory / "out")))
                print(" | ".join(f"{run.tokens_per_s:,.1f} tokens/s" for run in turns[-1]), flush=True)
    ratios = [on_spark.tokens_per_s / bare.tokens_per_s for bare, on_spark in turns]
    return Result(
        ratio_to_bare_engine=round(median(ratios), 4),
        ratios=[round(ratio, 4) for ratio in ratios],
        bare_tokens_per_s=[round(bare.tokens_per_s, 1) for bare, _ in turns],
        spark_tokens_per_s=[round(on_spark.tokens_per_s, 1) for _, on_spark in turns],
        rows=rows,
        tokens=turns[0][0].tokens,
        bare_start_s=round(bare_start_s, 1),
        spark_start_s=round(spark_start_s, 1),
        texts_identical=all(bare.texts == on_spark.texts for bare, on_spark in turns),
        cores=len(os.sched_getaffinity(0)),
        load_average=os.getloadavg(),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path, help="write the result here, too")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--copies", type=int, default=3, help="of the demo table's 2,223 rows")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        result = compare(arguments.repeats, arguments.copies, Path(directory))
    if arguments.json:
        arguments.json.write_text(json.dumps(asdict(result), indent=1) + "\n")
    print(json.dumps(asdict(result), indent=1))


if __name__ == "__main__":
    main()
