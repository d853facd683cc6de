"""The UDF's answers go out in the input's order, and reading ahead of them is bounded."""

import threading
from random import Random

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from pipemax_spark.executor.task import PIECE_ROWS
from pipemax_spark.functions.udf import _MOST_PIECES_AHEAD, OrderedRows
from tests.waiting import wait_until


@given(sizes=st.lists(st.integers(0, 600), min_size=1, max_size=6), seed=st.integers())
def test_whatever_order_the_answers_come_in(sizes: list[int], seed: int) -> None:
    total = sum(sizes)
    texts = [f"prompt {i}" for i in range(total)]
    left = iter(texts)
    rows = OrderedRows(iter([pa.array([next(left) for _ in range(size)], pa.string()) for size in sizes]))
    asked = [
        pair
        for batch in rows.requests()
        for pair in zip(batch.column("row_id").to_pylist(), batch.column("prompt").to_pylist(), strict=True)
    ]
    assert [prompt for _, prompt in asked] == texts
    Random(seed).shuffle(asked)
    answers: list[str] = []
    while asked:
        some, asked = asked[:83], asked[83:]
        rows.put([row_id for row_id, _ in some], pa.array([prompt for _, prompt in some]))
        for piece in rows.take():
            answers += piece.to_pylist()
    assert answers == texts


def test_reading_waits_for_a_slow_first_row_and_ends_when_closed() -> None:
    batch = pa.array(["x"] * PIECE_ROWS)
    rows = OrderedRows(iter([batch] * (_MOST_PIECES_AHEAD + 3)))
    read: list[pa.RecordBatch] = []
    reading = threading.Thread(target=lambda: [read.append(batch) for batch in rows.requests()])
    reading.start()
    wait_until(lambda: len(read) == _MOST_PIECES_AHEAD)
    rows.put(range(PIECE_ROWS), batch)
    assert len(list(rows.take())) == 1
    wait_until(lambda: len(read) == _MOST_PIECES_AHEAD + 1)
    assert reading.is_alive(), "it reads no further while the next piece has no answer"
    rows.close()
    reading.join()
    assert len(read) == _MOST_PIECES_AHEAD + 1
