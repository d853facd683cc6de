"""What a run does before, instead of and after its chunks, on Iceberg tables: reuse, canaries, orders and limits."""

from dataclasses import replace

import pytest

from pipemax.wire import GenerationSpec
from pipemax_spark.errors import CanaryError, OnError
from tests.spark.iceberg.conftest import IcebergJobs

pytestmark = pytest.mark.iceberg


def texts(first: int, end: int, words: int = 3) -> list[tuple[int, str]]:
    return [(i, f"row {i} {'word ' * (words + i % 5)}") for i in range(first, end)]


def ids(run: IcebergJobs) -> list[int]:
    return sorted(row["id"] for row in run.rows())


def test_answers_of_an_iceberg_table_are_taken_over_by_another(run: IcebergJobs) -> None:
    run.write_input(texts(0, 40))
    run.run(id_columns=("id",))
    earlier, run.output = run.output, f"{run.output}_2"
    run.defaults = replace(run.defaults, output=run.output)
    run.write_input([(i + 100, text) for i, text in texts(0, 50)])
    again = run.run(id_columns=("id",), reuse=earlier, order_by="id DESC")
    assert (again.rows_from_table, again.rows_out) == (40, 10)
    assert ids(run) == [*range(100, 150)]
    run.spark.sql(f"DROP TABLE {run.output}")


def test_a_canary_and_a_limit_end_a_run_on_an_iceberg_table(run: IcebergJobs) -> None:
    run.defaults = replace(
        run.defaults, id_columns=("id",), generation=GenerationSpec(choice=("mild", "spicy"))
    )
    run.write_input(texts(0, 300))
    run.run()
    run.write_input(texts(0, 300) + texts(300, 600, words=12))
    for _ in range(2):
        with pytest.raises(CanaryError, match="prompt tokens"):
            run.run(canary=100)
    begun = len(ids(run))
    ended = run.run(max_tokens_total=1)
    assert (ended.ended_by, ended.complete, ended.rows_left) == ("max_tokens_total", False, 600 - begun)
    assert run.run().complete
    assert ids(run) == [*range(600)]


def test_a_table_that_was_rolled_back_behind_a_dead_run_gets_all_rows_that_it_lacks(run: IcebergJobs) -> None:
    """A rollback is no commit: only that the dead run's claim is gone shows that its list is out of date."""
    source = f"{run.output}_in"
    run.defaults = replace(run.defaults, id_columns=("id",), input=source)
    schema = "id long, text string"
    run.spark.createDataFrame(texts(0, 10), schema).writeTo(source).create()
    run.run()
    snapshots = run.spark.sql(f"SELECT snapshot_id FROM {run.output}.snapshots ORDER BY committed_at")
    first = snapshots.first()[0]
    run.spark.createDataFrame([*texts(10, 15), (15, None)], schema).writeTo(source).append()
    with pytest.raises(Exception, match="a row failed with empty_prompt"):
        run.run(on_error=OnError.FAIL)
    catalog, _, table = run.output.partition(".")
    run.spark.sql(f"CALL {catalog}.system.rollback_to_snapshot('{table}', {first})")
    assert ids(run) == []
    assert run.run().complete
    assert ids(run) == [*range(16)]
    run.spark.sql(f"DROP TABLE {source}")
