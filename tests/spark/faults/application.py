"""A Spark application that runs what it is told to, for tests that disturb it from outside.

python -m tests.spark.faults.application DIRECTORY: a line of JSON in (``Order``), a line of JSON out: the rows of the
output table as (id, text of the annotation, error code), or the error that ended the job. Its standard error is the
driver's own.
"""

import json
import logging
import sys
import threading
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from pipemax.wire import GenerationSpec
from pipemax_spark.annotate import ANNOTATION, annotate, annotate_with
from pipemax_spark.client import EngineOptions
from pipemax_spark.job import AnnotationJob
from pipemax_spark.options import JobOptions
from pipemax_spark.profiles import gpu_profile
from pipemax_spark.prompts import PromptSource
from pipemax_spark.session import get_session
from pipemax_spark.task import TaskPlan
from tests.fakes.collector import FakeCollector

SOURCE = PromptSource(template="Say {text}")
MAX_TOKENS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """One thing to run."""

    number: int
    kind: str
    """``job``: an ``AnnotationJob``; ``frame``: the same tasks into Parquet files, by a client that soon takes
    silence for death and whose collector goes away; ``profile``: ``annotate`` on executors of their own; ``sql``: a
    statement."""
    input: str = ""
    output: str = ""
    engine: dict[str, Any] = field(default_factory=dict)
    engine_python: str = ""
    work_dir: str | None = None
    statement: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    number: int
    error: str | None = None
    """What ended it; then there are no rows."""
    rows: list[tuple[int, str | None, str | None]] = field(default_factory=list)
    """(id, text, error code) of the output table."""


class Application:
    """Runs each order on a thread of its own."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._spark = get_session("faults", log_dir=directory / "logs")
        self._lock = threading.Lock()

    def serve(self) -> None:
        for line in sys.stdin:
            order = Order(**json.loads(line))
            threading.Thread(target=self._answer, args=(order,), name=f"order-{order.number}").start()

    def _answer(self, order: Order) -> None:
        try:
            self._run(order)
            answer = Answer(number=order.number, rows=self._rows(order))
        except Exception as error:
            logging.exception("order %d failed", order.number)
            answer = Answer(number=order.number, error=f"{type(error).__name__}: {error}")
        with self._lock:
            print(json.dumps(asdict(answer)), flush=True)

    def _run(self, order: Order) -> None:
        match order.kind:
            case "job":
                self._run_job(order)
            case "frame":
                self._run_frame(order)
            case "profile":
                self._run_with_profile(order)
            case "sql":
                self._spark.sql(order.statement)
            case unknown:
                raise ValueError(f"unknown order {unknown!r}")

    def _rows(self, order: Order) -> list[tuple[int, str | None, str | None]]:
        if not order.output:
            return []
        table = self._spark.read.format("delta" if order.kind == "job" else "parquet").load(order.output)
        rows = table.select("id", f"{ANNOTATION}.text", f"{ANNOTATION}.error.code").collect()
        return [tuple(row) for row in rows]

    def _run_job(self, order: Order) -> None:
        options = JobOptions(
            input=order.input,
            output=order.output,
            source=SOURCE,
            engine=order.engine,
            generation=GenerationSpec(max_tokens=MAX_TOKENS),
            engine_python=order.engine_python,
            id_columns=("id",),
            work_dir=order.work_dir,
            log_dir=self._directory / "logs",
        )
        AnnotationJob(self._spark, options, Console(file=sys.stderr, width=200)).run()

    def _run_frame(self, order: Order) -> None:
        with FakeCollector() as collector:
            plan = TaskPlan(
                options=EngineOptions(
                    engine=order.engine,
                    generation=GenerationSpec(max_tokens=MAX_TOKENS),
                    job_id=f"frame-{order.number}",
                    engine_python=order.engine_python,
                    collector=collector.address("token"),
                    log_dir=str(self._directory / "logs"),
                    silence_timeout_s=4.0,
                ),
                spec_hash="hash",
                run_id=f"frame-{order.number}",
                output_column=ANNOTATION,
            )
            threading.Thread(target=_end_when_heard, args=(collector,)).start()
            rows = self._spark.read.parquet(order.input).repartition(4)
            annotate_with(rows, SOURCE, plan).write.parquet(order.output)

    def _run_with_profile(self, order: Order) -> None:
        profile = gpu_profile(self._spark, gpus_per_executor=2, task_slots=1, memory="512m")
        annotated = annotate(
            self._spark.read.parquet(order.input),
            engine=order.engine,
            template=SOURCE.template,
            max_tokens=MAX_TOKENS,
            engine_python=order.engine_python,
            log_dir=str(self._directory / "logs"),
            profile=profile,
        )
        annotated.write.parquet(order.output)


def _end_when_heard(collector: FakeCollector) -> None:
    """The collector goes away after the first report that it gets."""
    deadline_s = time.monotonic() + 60
    while not collector.reports and time.monotonic() < deadline_s:
        time.sleep(0.05)
    collector.shutdown()


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING)
    Application(Path(sys.argv[1])).serve()
