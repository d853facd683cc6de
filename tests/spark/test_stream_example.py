"""``examples/annotate_stream.py``: a stream that annotates in ``foreachBatch`` and dies between two steps."""

from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql.readwriter import DataFrameWriter

from examples import annotate_stream
from pipemax_spark.storage.tables import DeltaTable
from tests.fakes.settings import expected_text


class DiedError(RuntimeError):
    """The driver dies here."""


@pytest.mark.long  # three jobs
def test_a_batch_that_is_repeated_after_its_write_is_written_once(
    spark: Any, tmp_path: Path, fake: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    places = [str(tmp_path / name) for name in ("in", "out", "checkpoint")]
    batches: list[int] = []

    def add(first: int, end: int) -> None:
        rows = [(i, f"word {i}") for i in range(first, end)]
        spark.createDataFrame(rows, "id long, text string").write.format("delta").mode("append").save(
            places[0]
        )

    def run() -> None:
        annotate_stream.start(spark, *places, template="Say {text}", max_tokens=16, **fake).awaitTermination()

    def rows() -> dict[int, str]:
        found = [
            (row["id"], row["annotation"]["text"])
            for row in spark.read.format("delta").load(places[1]).collect()
        ]
        assert len({*found}) == len(found), "each row once"
        return dict(found)

    def expected(end: int) -> dict[int, str]:
        return {i: expected_text(f"Say word {i}", 16) for i in range(end)}

    annotate, save = annotate_stream.annotate, DataFrameWriter.save

    def counted(frame: Any, **options: Any) -> Any:
        batches.append(frame.count())
        return annotate(frame, **options)

    def dying(*arguments: Any, **options: Any) -> None:
        save(*arguments, **options)
        raise DiedError

    monkeypatch.setattr(annotate_stream, "annotate", counted)
    add(0, 5)
    with monkeypatch.context() as patch:
        patch.setattr(DataFrameWriter, "save", dying)
        with pytest.raises(StreamingQueryException, match="DiedError"):
            run()
    assert rows() == expected(5), "the batch is written, and the checkpoint does not know it"
    add(5, 8)
    run()
    assert batches == [5, 5, 3], "the same batch came again"
    assert rows() == expected(8)
    commits = [commit for commit in DeltaTable(spark, places[1]).history(-1) if commit is not None]
    assert [commit.rows for commit in commits] == [3, 5]
