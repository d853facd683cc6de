"""One local Spark with Delta, and jobs against the real server around a fast fake engine."""

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
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
from pipemax_spark.report.summary import Summary
from pipemax_spark.report.terminal import Terminal
from pipemax_spark.request.prompts import PromptSource
from pipemax_spark.storage import fence
from pipemax_spark.storage.output_table import OutputTable
from tests.fakes.engine_python import write_engine_python
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


@contextmanager
def set_to(spark: Any, values: Mapping[str, str]) -> Iterator[None]:
    """Set the session's settings to these values within the context."""
    before = {name: spark.conf.get(name, None) for name in values}
    for name, value in values.items():
        spark.conf.set(name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            spark.conf.unset(name) if value is None else spark.conf.set(name, value)


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

    def run(self, *, table: OutputTable | None = None, **changes: Any) -> Summary:
        """Run the job, which must not be a dry run, on ``table`` or on that of the output's name."""
        summary = self._run(table, **changes)
        assert summary is not None
        return summary

    def dry_run(self, **changes: Any) -> None:
        assert self._run(None, dry_run=True, **changes) is None

    def _run(self, table: OutputTable | None, **changes: Any) -> Summary | None:
        printed = StringIO()
        options = replace(self.defaults, **changes)
        try:
            terminal = Terminal(Console(file=printed, width=200))
            return AnnotationJob(self.spark, options, terminal, table=table).run()
        finally:
            self.printed = printed.getvalue()

    def rows(self) -> list[dict[str, Any]]:
        return [
            row.asDict(recursive=True) for row in self.spark.read.format("delta").load(self.output).collect()
        ]


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
def tracked_jobs(
    spark: Any, tmp_path: Path, engine_python: str, monkeypatch: pytest.MonkeyPatch
) -> Callable[[], Jobs]:
    """With MLflow."""
    return lambda: Jobs(spark, tmp_path, engine_python)


@pytest.fixture
def run(spark: Any, tmp_path: Path, engine_python: str) -> Jobs:
    """Without MLflow, whose store takes ten seconds to make; what it records is ``test_tracking``'s business."""
    made = Jobs(spark, tmp_path, engine_python)
    made.defaults = replace(made.defaults, mlflow_experiment="")
    return made


@pytest.fixture
def jobs(run: Jobs) -> Callable[[], Jobs]:
    return lambda: run


def object_schema(**properties: Any) -> str:
    return json.dumps({"type": "object", "properties": properties, "required": list(properties)})
