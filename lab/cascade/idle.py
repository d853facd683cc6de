"""``python -m lab.cascade.idle``: how long the large engine waits between the jobs of a cascade.

A cascade's jobs follow each other with one large engine, which has nothing to do from the last row of one job to the
first row of the next. Both engines are the tests' fakes, which answer as fast as they are told to, so that the time
between the jobs is Spark's and Delta's. It is read from ``completed_at`` of the rows in the cascade's tables.
"""

import argparse
import os
import sys
import tempfile
from io import StringIO
from pathlib import Path
from typing import Any

from rich.console import Console

from pipemax.wire import GenerationSpec
from pipemax_spark.job.cascade import CascadeJob
from pipemax_spark.options import JobOptions
from pipemax_spark.report.terminal import Terminal
from pipemax_spark.request.prompts import PromptSource
from pipemax_spark.spark.session import get_session
from tests.fakes.engine_python import write_engine_python
from tests.fakes.settings import fake_config

_JOBS = ("pilot_labels", "labels", "again_labels", "the output")
"""Those of the large model, by their tables."""


def spans(spark: Any, directory: Path) -> dict[str, tuple[float, float, int]]:
    """Return the first and the last second of each job's large answers, and their number."""
    found: dict[str, tuple[float, float, int]] = {}
    known: set[int] = set()
    for name in _JOBS:
        is_output = name == "the output"
        for path in [directory / "out"] if is_output else [*directory.rglob(f"cascade/*/1/{name}")]:
            rows = spark.read.format("delta").load(str(path))
            if is_output:
                rows = rows.where("annotation.model = 'fake'")
            seconds = rows.selectExpr("id", "cast(annotation.completed_at AS double) AS s").collect()
            times = {row["id"]: row["s"] for row in seconds if not (is_output and row["id"] in known)}
            known |= times.keys()
            found[name] = (min(times.values()), max(times.values()), len(times))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=5_000)
    parser.add_argument("--rows-per-s", type=float, default=200.0, help="of the large engine")
    arguments = parser.parse_args()
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        spark = get_session("idle", log_dir=directory)
        rows = spark.range(arguments.rows).selectExpr("id", "concat('shop sells item ', id) AS text")
        rows.write.parquet(str(directory / "in.parquet"))
        tokens_per_s = arguments.rows_per_s  # a choice is one token of the fake
        options = JobOptions(
            input=str(directory / "in.parquet"),
            output=str(directory / "out"),
            source=PromptSource(template="Say {text}"),
            engine=fake_config("fake", tokens_per_s=tokens_per_s),
            cascade=fake_config("fake-small", errs=0.2, tokens_per_s=10 * tokens_per_s),
            generation=GenerationSpec(choice=("bread", "cheese", "fruit", "nuts")),
            engine_python=write_engine_python(directory / "python"),
            id_columns=("id",),
            agree=0.9,
            log_dir=directory / "logs",
            mlflow_experiment="",
        )
        printed = StringIO()
        summary = CascadeJob(spark, options, Terminal(Console(file=printed, width=200))).run()
        assert summary is not None, printed.getvalue()
        assert summary.complete, printed.getvalue()
        last_end_s = None
        for job, (first_s, end_s, count) in spans(spark, directory).items():
            waited = "" if last_end_s is None else f", {first_s - last_end_s:.1f} s after the last job's end"
            print(f"{job}: {count:,} rows in {end_s - first_s:.1f} s{waited}")
            last_end_s = end_s
        spark.stop()


if __name__ == "__main__":
    main()
