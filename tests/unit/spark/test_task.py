"""What a task keeps while the engine works: rows in pieces, each let go once it is complete."""

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from pipemax_spark.spool import Spool
from pipemax_spark.task import PROMPT_COLUMN, PendingRows


@given(sizes=st.lists(st.integers(0, 700), min_size=1, max_size=5), seed=st.randoms())
def test_rows_come_back_beside_their_own_completions_in_any_order(sizes: list[int], seed) -> None:  # type: ignore[no-untyped-def]
    total = sum(sizes)
    values = iter(range(total))
    batches = []
    for size in sizes:
        numbers = [next(values) for _ in range(size)]
        batches.append(
            pa.RecordBatch.from_pydict({"n": numbers, PROMPT_COLUMN: [f"prompt {n}" for n in numbers]})
        )
    pending = PendingRows(iter(batches), Spool(None, partition=0))
    prompts: dict[int, str] = {}
    for request in pending.requests():
        prompts |= dict(
            zip(request.column("row_id").to_pylist(), request.column("prompt").to_pylist(), strict=True)
        )
    row_ids = list(prompts)
    seed.shuffle(row_ids)
    seen = []
    while row_ids:
        some, row_ids = row_ids[:97], row_ids[97:]
        completions = pa.RecordBatch.from_pydict(
            {"row_id": pa.array(some, pa.int64()), "text": [prompts[i] for i in some]}
        )
        rows, ordered = pending.take(completions)
        assert rows.schema.names == ["n"], "the helper columns are gone"
        assert [f"prompt {n}" for n in rows.column("n").to_pylist()] == ordered.column("text").to_pylist()
        seen += rows.column("n").to_pylist()
    assert sorted(seen) == list(range(total))
    assert not pending._pieces, "every piece is let go"
