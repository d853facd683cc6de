"""Chunks of one run, through real Spark, without engines' reports."""

from pathlib import Path
from typing import Any

from pipemax.wire import GenerationSpec
from pipemax_spark.dataframe import annotated_schema, engine_options
from pipemax_spark.executor.task import TaskPlan
from pipemax_spark.job.chunks import ChunkPlan, SlicedRows, write_slices
from pipemax_spark.job.outcomes import AppendedOutcomes
from pipemax_spark.job.runner import ChunkRunner
from pipemax_spark.prompts import PromptSource
from pipemax_spark.request_columns import RequestColumns
from pipemax_spark.slots import Slots
from pipemax_spark.storage.fence import Claim
from pipemax_spark.storage.tables import DeltaTable, Transaction
from tests.fakes.engine import fake_config


class CountedOutcomes(AppendedOutcomes):
    """Notes how many partitions each chunk has."""

    def __init__(self, table: DeltaTable) -> None:
        super().__init__(table)
        self.partitions: list[int] = []

    def commit(self, rows: Any, transaction: Transaction) -> int:
        self.partitions.append(rows.rdd.getNumPartitions())
        return super().commit(rows, transaction)


def test_a_node_that_joins_gets_its_share_of_the_next_chunk(
    spark: Any, engine_python: str, tmp_path: Path
) -> None:
    from pyspark.sql import functions as F  # noqa: N812

    columns = RequestColumns(PromptSource(prompt_column="text"))
    rows = spark.range(1_000, numPartitions=2).selectExpr("id", "concat('word ', id) AS text")
    path = str(tmp_path / "rows")
    write_slices(columns.add_with_keys(rows), path, identity=F.col("id"), slices=4, slots=1)
    sliced = SlicedRows(spark, path, rows.schema, slices=4)
    table = DeltaTable(spark, str(tmp_path / "out"))
    options = engine_options(
        spark, fake_config(), GenerationSpec(max_tokens=4), engine_python=engine_python, log_dir=None
    )
    plan = TaskPlan(options=options, spec_hash="", run_id=options.job_id, output_column="annotation")
    table.create(annotated_schema(rows.schema, plan.output_column, options.generation))
    outcomes = CountedOutcomes(table)
    nodes = [1]

    def slots() -> Slots:
        return Slots(total=2 * nodes[0], per_executor=2)

    def join(chunk: Any) -> None:
        nodes[0] = 1 if chunk.number == 0 else 2

    runner = ChunkRunner(
        spark,
        rows=sliced,
        chunks=ChunkPlan(slice_rows=sliced.slice_rows, slots=1, commit_every_s=1),
        request_columns=columns,
        plan=plan,
        slots=slots,
        note_chunk=join,
        spool=None,
        claim=Claim.take(table, plan.run_id),
        outcomes=outcomes,
    )
    runner.run(lambda: None, lambda: None, every_second=lambda: None)
    first, *later = outcomes.partitions
    assert first == 2
    assert len(later) >= 2
    assert min(later) >= 4
