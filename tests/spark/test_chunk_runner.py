"""Chunks of one run, through real Spark, without engines' reports."""

import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from pipemax.wire import GenerationSpec, PreflightReply
from pipemax_spark.engines.config import engine_options
from pipemax_spark.errors import JobFailedError, LimitReachedError, TooManyErrorsError
from pipemax_spark.executor.task import TaskPlan
from pipemax_spark.job.job import Job
from pipemax_spark.job.outcomes import AppendedOutcomes
from pipemax_spark.job.preparing import Prepared
from pipemax_spark.job.runner import ChunkRunner
from pipemax_spark.options import JobOptions
from pipemax_spark.report.terminal import Terminal
from pipemax_spark.request.columns import RequestColumns
from pipemax_spark.request.prompts import PromptSource
from pipemax_spark.rows.annotated import annotated_schema
from pipemax_spark.rows.chunks import Chunk, SlicedRows, write_slices
from pipemax_spark.spark.slots import Slots
from pipemax_spark.storage.fence import Claim
from pipemax_spark.storage.tables import DeltaTable, Transaction
from tests.fakes.settings import fake_config
from tests.waiting import wait_until

pytestmark = pytest.mark.all_lanes


class CountedOutcomes(AppendedOutcomes):
    """Notes how many partitions each chunk has."""

    def __init__(self, table: DeltaTable) -> None:
        super().__init__(table)
        self.partitions: list[int] = []

    def commit(self, rows: Any, transaction: Transaction) -> int:
        self.partitions.append(rows.rdd.getNumPartitions())
        return super().commit(rows, transaction)


class StragglingOutcomes(AppendedOutcomes):
    """One task of each of the first three chunks does not end before the fourth chunk is submitted."""

    def __init__(self, table: DeltaTable, directory: Path) -> None:
        super().__init__(table)
        self._fourth_begins = directory / "fourth-begins"
        self._lock = threading.Lock()
        self._num_begun = self._num_ended = 0

    def commit(self, rows: Any, transaction: Transaction) -> int:
        fourth_begins = str(self._fourth_begins)

        def straggle(batches: Iterator[Any]) -> Iterator[Any]:
            from pyspark import TaskContext

            yield from batches
            context = TaskContext.get()
            if context is not None and context.partitionId() == 0:
                wait_until(Path(fourth_begins).exists, 120, "the fourth chunk is submitted")

        with self._lock:
            self._num_begun += 1
            if self._num_begun == 4:
                assert self._num_ended == 0, "the chunks before wait for their stragglers"
                self._fourth_begins.touch()
        num_kept = super().commit(rows.mapInArrow(straggle, rows.schema), transaction)
        with self._lock:
            self._num_ended += 1
        return num_kept


class CancellingOutcomes(AppendedOutcomes):
    """Cancels the run when it has no Spark job that could be cancelled: before the first chunk's append."""

    def __init__(self, table: DeltaTable, runner: Callable[[], ChunkRunner]) -> None:
        super().__init__(table)
        self._runner = runner

    def commit(self, rows: Any, transaction: Transaction) -> int:
        self._runner().cancel(TooManyErrorsError("too many rows failed"))
        return super().commit(rows, transaction)


class Unheard:
    """A run whose engines report nothing."""

    def __init__(self, slots: Callable[[], Slots]) -> None:
        self.slots = slots

    def rows_per_s(self) -> float | None:
        return None

    def engine_rows(self) -> int | None:
        return None

    def length_correlation(self) -> float | None:
        return None

    def most_rows(self) -> int | None:
        return None

    def longest_chunk_s(self) -> float | None:
        return None

    def none_fits(self) -> LimitReachedError:
        raise AssertionError("there is no limit")

    def begun(self, chunk: Chunk) -> None:
        pass

    def committed(self, chunk: Chunk) -> None:
        pass

    def every_second(self) -> None:
        pass


def run_chunks(
    spark: Any,
    directory: Path,
    engine_python: str,
    *,
    rows: int,
    slots: Callable[[], Slots],
    outcomes_of: Callable[[DeltaTable], AppendedOutcomes],
    note_chunk: Callable[[Any], None] = lambda chunk: None,
    watch: Callable[[ChunkRunner], None] = lambda runner: None,
) -> DeltaTable:
    """Annotate rows 0 to ``rows`` in eight slices, two to a chunk; return the output."""
    from pyspark.sql import functions as F  # noqa: N812

    source = PromptSource(prompt_column="text")
    columns = RequestColumns(source)
    left = spark.range(rows, numPartitions=2).selectExpr("id", "concat('word ', id) AS text")
    path = str(directory / "rows")
    span = write_slices(columns.add_with_keys(left), path, identity=F.col("id"), slices=8, slots=1)
    sliced = SlicedRows(spark, [span], left.schema)
    table = DeltaTable(spark, str(directory / "out"))
    engine = engine_options(
        spark, fake_config(), GenerationSpec(max_tokens=4), engine_python=engine_python, log_dir=None
    )
    plan = TaskPlan(options=engine, spec_hash="", run_id=engine.job_id, output_column="annotation")
    table.create(annotated_schema(left.schema, plan.output_column, engine.generation))
    options = JobOptions(
        input="in",
        output=table.name,
        source=source,
        engine=fake_config(),
        generation=engine.generation,
        commit_every=timedelta(seconds=1),
        log_dir=directory,
    )
    checked: Any = SimpleNamespace(plan=plan, reply=PreflightReply())
    work: Any = SimpleNamespace(note_chunk=note_chunk)
    job = Job(
        spark=spark,
        options=options,
        terminal=Terminal(Console(file=StringIO())),
        table=table,
        run_id=plan.run_id,
        checked=checked,
        work=work,
    )
    prepared = Prepared(
        rows=sliced, num_left=rows, claim=Claim.take(table, plan.run_id), outcomes=outcomes_of(table)
    )
    runner = ChunkRunner(job, prepared, Unheard(slots))
    watch(runner)
    runner.run()
    return table


@pytest.mark.long  # speed
def test_a_fourth_chunk_starts_while_three_wait_for_their_last_tasks(
    spark: Any, engine_python: str, tmp_path: Path
) -> None:
    table = run_chunks(
        spark,
        tmp_path,
        engine_python,
        rows=2_048,
        slots=lambda: Slots(total=2, per_executor=2),
        outcomes_of=lambda table: StragglingOutcomes(table, tmp_path),
    )
    assert (tmp_path / "fourth-begins").exists()
    assert [row["id"] for row in table.read().select("id").orderBy("id").collect()] == list(range(2_048))


@pytest.mark.long  # speed
def test_a_node_that_joins_gets_its_share_of_the_next_chunk(
    spark: Any, engine_python: str, tmp_path: Path
) -> None:
    counted: list[CountedOutcomes] = []
    nodes = [1]

    def outcomes_of(table: DeltaTable) -> CountedOutcomes:
        counted.append(CountedOutcomes(table))
        return counted[0]

    def join(chunk: Any) -> None:
        nodes[0] = 1 if chunk.number == 0 else 2

    run_chunks(
        spark,
        tmp_path,
        engine_python,
        rows=2_048,
        slots=lambda: Slots(total=2 * nodes[0], per_executor=2),
        outcomes_of=outcomes_of,
        note_chunk=join,
    )
    first, *later = counted[0].partitions
    assert first == 2
    assert len(later) >= 2
    assert min(later) >= 4


@pytest.mark.long  # tests/unit/spark/test_chunk_turns.py has the turns
def test_a_run_that_is_cancelled_between_two_chunks_tells_the_reason(
    spark: Any, engine_python: str, tmp_path: Path
) -> None:
    runners: list[ChunkRunner] = []
    with pytest.raises(JobFailedError, match="too many rows failed"):
        run_chunks(
            spark,
            tmp_path,
            engine_python,
            rows=2_048,
            slots=lambda: Slots(total=2, per_executor=2),
            outcomes_of=lambda table: CancellingOutcomes(table, lambda: runners[0]),
            watch=runners.append,
        )
