"""One local Spark with Delta, and jobs against the real server around a fast fake engine."""

import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from pipemax.wire import GenerationSpec
from pipemax_spark.job import runner
from pipemax_spark.job.annotation_job import AnnotationJob
from pipemax_spark.options import JobOptions
from pipemax_spark.report.terminal import Terminal
from pipemax_spark.request.prompts import PromptSource
from pipemax_spark.storage import fence
from pipemax_spark.storage.output_table import OutputTable
from tests.fakes.engine_python import write_engine_python
from tests.fakes.settings import fake_config
from tests.spark.processes import SMALL_SPARK


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from pipemax_spark.spark.session import get_session

    os.environ["PYSPARK_PYTHON"] = sys.executable
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYSPARK_SUBMIT_ARGS", f"{SMALL_SPARK} pyspark-shell")
        session = get_session("tests", log_dir=tmp_path_factory.mktemp("spark"))
    yield session
    session.stop()


@pytest.fixture(scope="session")
def engine_python(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_engine_python(tmp_path_factory.mktemp("engine") / "python")


@pytest.fixture(scope="session")
def fake(engine_python: str) -> dict[str, Any]:
    """What ``annotate()`` and the UDF need for an engine: the fast fake."""
    return {"engine": fake_config(), "engine_python": engine_python}


class Jobs:
    """Runs jobs that share an output table, and keeps what they printed."""

    def __init__(self, spark: Any, directory: Path, engine_python: str) -> None:
        self.spark = spark
        self.directory = directory
        self.output = str(directory / "out")
        self.printed = ""
        self.defaults = JobOptions(
            input=str(directory / "in.parquet"),
            output=self.output,
            source=PromptSource(template="Say {text}"),
            engine={"model": "fake"},
            generation=GenerationSpec(max_tokens=16),
            engine_python=engine_python,
            log_dir=directory / "logs",
        )

    def write_input(self, rows: list[tuple[Any, ...]], schema: str = "id long, text string") -> None:
        self.spark.createDataFrame(rows, schema).write.mode("overwrite").parquet(
            str(self.directory / "in.parquet")
        )

    def run(self, *, table: OutputTable | None = None, **changes: Any) -> Any:
        """Return the job's summary, or None after a dry run."""
        options = replace(self.defaults, **changes)
        with self.terminal() as terminal:
            return AnnotationJob(self.spark, options, terminal, table=table).run()

    def dry_run(self, **changes: Any) -> None:
        assert self.run(dry_run=True, **changes) is None

    @contextmanager
    def terminal(self) -> Iterator[Terminal]:
        """Yield a log whose lines are ``printed`` afterwards."""
        stream = StringIO()
        try:
            yield Terminal(Console(file=stream, width=200))
        finally:
            self.printed = stream.getvalue()

    def rows(self) -> list[dict[str, Any]]:
        return [
            row.asDict(recursive=True) for row in self.spark.read.format("delta").load(self.output).collect()
        ]


class Nights:
    """An input table, and one job a night over what it got."""

    def __init__(self, jobs: Jobs) -> None:
        self.jobs = jobs
        self.input = str(jobs.directory / "in")

    def append(self, rows: list[tuple[Any, ...]], schema: str = "id long, text string") -> None:
        frame = self.jobs.spark.createDataFrame(rows, schema)
        frame.write.format("delta").mode("append").option("mergeSchema", "true").save(self.input)

    def run(self, **changes: Any) -> tuple[int, int, int]:
        """(rows in, skipped, out)."""
        summary = self.jobs.run(input=self.input, **{"incremental": True, **changes})
        return summary.rows_in, summary.rows_skipped, summary.rows_out

    def sql(self, statement: str) -> None:
        self.jobs.spark.sql(statement.format(input=f"delta.`{self.input}`"))

    def ids(self) -> list[int]:
        return sorted(row["id"] for row in self.jobs.rows())

    def appends(self) -> list[tuple[str, int]]:
        """By Delta's own history: the note and the rows of each commit that added any, oldest first."""
        history = (
            self.jobs.spark.sql(f"DESCRIBE HISTORY delta.`{self.jobs.output}`").orderBy("version").collect()
        )
        commits = [
            (row["userMetadata"] or "", row["operationMetrics"].get("numOutputRows")) for row in history
        ]
        return [(note, int(rows)) for note, rows in commits if rows and int(rows)]


def words(first: int, end: int) -> list[tuple[int, str]]:
    return [(i, f"word {i}") for i in range(first, end)]


@pytest.fixture(autouse=True)
def few_lanes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two lanes instead of six: a claim commits once for each, which is half of a small run's time in Spark.

    What is about lanes has all of them: it is marked ``all_lanes``.
    """
    if request.node.get_closest_marker("all_lanes") is None:
        for module in (fence, runner):
            monkeypatch.setattr(module, "LANES", 2)


@pytest.fixture
def interruptible() -> Iterator[None]:
    """SIGINT interrupts, also where a shell that ignores it has started the tests in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def tracked_run(spark: Any, tmp_path: Path, engine_python: str) -> Jobs:
    """With MLflow."""
    return Jobs(spark, tmp_path, engine_python)


@pytest.fixture
def run(spark: Any, tmp_path: Path, engine_python: str) -> Jobs:
    """Without MLflow, whose store takes ten seconds to make; what it records is ``test_tracking``'s business."""
    made = Jobs(spark, tmp_path, engine_python)
    made.defaults = replace(made.defaults, mlflow_experiment="")
    return made


@pytest.fixture
def nights(run: Jobs) -> Nights:
    return Nights(run)


def object_schema(**properties: Any) -> str:
    return json.dumps({"type": "object", "properties": properties, "required": list(properties)})
