"""What a task keeps while the engine works: rows in pieces, each let go once it is complete."""

from collections.abc import Sequence

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from pipemax.wire import COMPLETION_SCHEMA
from pipemax_spark.executor.requests import IMAGES_COLUMN, KEY_COLUMN, PROMPT_COLUMN
from pipemax_spark.executor.spool import Spool
from pipemax_spark.executor.task import PendingRows


@given(sizes=st.lists(st.integers(0, 700), min_size=1, max_size=5), seed=st.randoms())
def test_rows_are_returned_with_their_own_completions_in_any_order(sizes: list[int], seed) -> None:  # type: ignore[no-untyped-def]
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


class EagerSpool(Spool):
    """Knows every row; whoever waits for its completions takes them the moment they are there."""

    def __init__(self) -> None:
        super().__init__(None, partition=0)
        self.pending: PendingRows | None = None
        self.taken: list[int] = []

    def recall(self, keys: Sequence[str], row_ids: pa.Array) -> pa.RecordBatch:
        completions = pa.RecordBatch.from_pylist(
            [{"row_id": row_id, "text": "known"} for row_id in row_ids.to_pylist()], schema=COMPLETION_SCHEMA
        )
        assert self.pending is not None
        rows, _ = self.pending.take(completions)
        self.taken += rows.column("n").to_pylist()
        return completions


def test_what_the_spool_knows_can_be_taken_before_the_request_is_out() -> None:
    spool = EagerSpool()
    batch = pa.RecordBatch.from_pydict(
        {"n": list(range(600)), PROMPT_COLUMN: ["p"] * 600, KEY_COLUMN: [str(n) for n in range(600)]}
    )
    spool.pending = PendingRows(iter([batch]), spool)
    assert [request.num_rows for request in spool.pending.requests()] == [0, 0, 0], (
        "the engine is asked nothing"
    )
    assert spool.taken == list(range(600))


def test_rows_with_large_images_leave_in_small_batches() -> None:
    batch = pa.RecordBatch.from_pydict(
        {"photo": [bytes(2**20)] * 150, PROMPT_COLUMN: ["what?"] * 150, IMAGES_COLUMN: [b"x"] * 150}
    )
    pending = PendingRows(iter([batch]), Spool(None, partition=0))
    (request,) = pending.requests()
    assert request.column("images").to_pylist()[0] == [{"content": b"x", "source": None}]
    completions = pa.RecordBatch.from_pydict({"row_id": request.column("row_id")})
    sizes = [pending.take(part)[0].nbytes for part in pending._in_parts(completions)]
    assert len(sizes) == 3
    assert max(sizes) <= 65 * 2**20
