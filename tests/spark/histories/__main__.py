"""Play random histories: ``make histories SEEDS=0-49``. A line for each goes to the report; the last line sums up."""

import argparse
import contextlib
import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.engine_python import write_engine_python
from tests.spark.conftest import Jobs
from tests.spark.histories.driver import watched
from tests.spark.histories.history import play
from tests.spark.histories.tables import IcebergOutput, Output
from tests.spark.processes import SMALL_SPARK

STEPS = 10
REPORT = Path("lab/results/histories.jsonl")


def seeds_of(text: str) -> list[int]:
    """Return the seeds that ``0-9,17`` names."""
    ranges = [part.partition("-") for part in text.split(",")]
    return [seed for first, _, last in ranges for seed in range(int(first), int(last or first) + 1)]


def outputs_of(jobs: Jobs, *, catalog: str | None) -> list[Output]:
    """Return two outputs that do not exist yet: Delta's by path, or Iceberg's in this catalog."""
    if catalog is None:
        return [Output(jobs.spark, str(jobs.directory / name)) for name in ("out", "two")]
    schema = f"{catalog}.{jobs.directory.name.replace('-', '_')}"
    jobs.spark.sql(f"CREATE NAMESPACE IF NOT EXISTS {schema}")
    return [IcebergOutput(jobs.spark, f"{schema}.{name}") for name in ("out", "two")]


def play_seed(
    spark: Any, directory: Path, engine_python: str, seed: int, *, catalog: str | None = None
) -> Any:
    jobs = Jobs(spark, directory, engine_python)
    jobs.defaults = replace(jobs.defaults, mlflow_experiment="")
    return play(jobs, outputs_of(jobs, catalog=catalog), seed, steps=STEPS)


@contextlib.contextmanager
def _session(directory: Path, *, catalog: str | None) -> Iterator[Any]:
    from pipemax_spark.spark.session import get_session

    os.environ["PYSPARK_PYTHON"] = sys.executable
    flags = ""
    if catalog is not None:
        prefix = f"--conf spark.sql.catalog.{catalog}"
        flags = (
            f"{prefix}=org.apache.iceberg.spark.SparkCatalog {prefix}.type=hadoop "
            f"{prefix}.warehouse={directory / 'lake'} "
        )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYSPARK_SUBMIT_ARGS", f"{flags}{SMALL_SPARK} pyspark-shell")
        spark = get_session("histories", log_dir=directory / "spark")
    yield spark
    spark.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", default="0-49", help="such as 0-49 or 3,17")
    parser.add_argument("--iceberg", action="store_true", help="the outputs are Iceberg tables")
    parser.add_argument("--report", type=Path, help="add a line for this run to this file")
    arguments = parser.parse_args()
    catalog = "lake" if arguments.iceberg else None
    seeds, failed, runs, begin_s = seeds_of(arguments.seeds), [], 0, time.monotonic()
    longest_s = 0.0
    with tempfile.TemporaryDirectory(prefix="histories-") as name, contextlib.chdir(name), watched():
        directory = Path(name)
        engine_python = write_engine_python(directory / "python")
        with _session(directory, catalog=catalog) as spark:
            for seed in seeds:
                place = directory / f"seed_{seed}"
                place.mkdir()
                since_s = time.monotonic()
                try:
                    history = play_seed(spark, place, engine_python, seed, catalog=catalog)
                    runs += history.runs
                    longest_s = max(longest_s, time.monotonic() - since_s)
                    print(f"seed {seed}: {history.runs} runs, {time.monotonic() - since_s:.0f} s", flush=True)
                    if len(seeds) == 1:
                        print("\n".join(f"  {said}" for said in history.log))
                except Exception as error:
                    failed.append(seed)
                    traceback.print_exception(error.__cause__ or error)
                    print(error, flush=True)
    facts = {
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "format": "iceberg" if arguments.iceberg else "delta",
        "seeds": arguments.seeds,
        "histories": len(seeds),
        "runs": runs,
        "failed": failed,
        "seconds": round(time.monotonic() - begin_s),
        "longest_s": round(longest_s),
        "load": round(os.getloadavg()[2], 1),
    }
    print(json.dumps(facts))
    if arguments.report is not None:
        with arguments.report.open("a") as report:
            report.write(json.dumps(facts) + "\n")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
