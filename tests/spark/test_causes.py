"""What a failed action of real Spark's says: its innermost cause."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from pipemax_spark.errors import failure_text
from tests.spark.conftest import Jobs


def raising(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    yield from ()
    raise ValueError(f"{next(batches).num_rows} rows are too many.\nAnd so on")


def fails_in_python(spark: Any, directory: Path) -> None:
    spark.range(3).coalesce(1).mapInArrow(raising, "id long").collect()


def fails_in_python_while_writing(spark: Any, directory: Path) -> None:
    rows = spark.range(3).coalesce(1).mapInArrow(raising, "id long")
    rows.write.format("delta").save(str(directory / "out"))


def cannot_merge(spark: Any, directory: Path) -> None:
    spark.range(1).selectExpr("string(id) id").write.parquet(str(directory / "in/a=1"))
    spark.range(1).selectExpr("array(id) id").write.parquet(str(directory / "in/a=2"))
    spark.read.option("mergeSchema", "true").parquet(str(directory / "in"))


def torn_file(spark: Any, directory: Path) -> None:
    (directory / "torn.parquet").write_bytes(b"PAR1 a torn file PAR1")
    spark.read.schema("id long").parquet(str(directory / "torn.parquet")).collect()


@pytest.mark.parametrize(
    ("action", "told"),
    [
        (fails_in_python, "ValueError: 3 rows are too many."),
        (fails_in_python_while_writing, "ValueError: 3 rows are too many."),
        (cannot_merge, 'Failed to merge incompatible data types "STRING" and "ARRAY<BIGINT>".'),
        (torn_file, "corrupted file: the footer index is not within the file"),
    ],
)
def test_a_failed_action_tells_its_innermost_cause(
    spark: Any, tmp_path: Path, action: Callable[[Any, Path], None], told: str
) -> None:
    with pytest.raises(Exception, match=r".") as failed:
        action(spark, tmp_path)
    text = failure_text(failed.value)
    assert told in text
    assert "\n" not in text
    assert "Traceback" not in text


@pytest.mark.long  # a job for one sentence
def test_a_partition_value_that_is_too_long_for_a_file_name_is_told_with_its_column(run: Jobs) -> None:
    run.spark.sql(
        f"CREATE TABLE delta.`{run.output}` (id BIGINT, text STRING, lang STRING) USING delta PARTITIONED BY (lang)"
    )
    run.write_input([(1, "one", "en"), (2, "two", "x" * 300)], "id long, text string, lang string")
    with pytest.raises(Exception, match=r".") as failed:
        run.run(id_columns=("id",))
    assert "File name too long: a value of partition column 'lang' makes a directory's name" in failure_text(
        failed.value
    )
