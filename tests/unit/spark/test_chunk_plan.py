"""Slices joined into chunks: each slice once, whatever the rates."""

from itertools import pairwise
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipemax_spark.rows.chunks import ChunkPlan, SliceSpan, number_of_slices, pick_slices
from pipemax_spark.spark.slots import Slots


@given(
    rows=st.integers(1, 2_000_000),
    slots=st.integers(1, 64),
    rates=st.lists(st.none() | st.floats(0.0, 1e6), max_size=30),
    random=st.randoms(use_true_random=False),
)
def test_chunks_follow_each_other_without_gap_or_overlap(
    rows: int, slots: int, rates: list[float | None], random: Random
) -> None:
    slices = number_of_slices(rows, slots)
    cuts = sorted(random.choices(range(rows + 1), k=slices - 1))
    slice_rows = [end - first for first, end in pairwise([0, *cuts, rows])]
    plan = ChunkPlan(slice_rows=slice_rows, slots=slots, commit_every_s=900)
    given_rates = iter(rates)
    while plan.next(next(given_rates, None)) is not None:
        pass
    chunks = plan.chunks
    assert [chunk.rows for chunk in chunks] == [
        sum(slice_rows[chunk.first_slice : chunk.end_slice]) for chunk in chunks
    ]
    assert sum(chunk.rows for chunk in chunks) == rows
    assert all(chunk.rows for chunk in chunks)
    assert [chunk.number for chunk in chunks] == list(range(len(chunks)))
    assert [chunk.first_slice for chunk in chunks] == [0, *(chunk.end_slice for chunk in chunks[:-1])]
    assert chunks[-1].end_slice == slices
    assert all(chunk.end_slice > chunk.first_slice for chunk in chunks)


@pytest.mark.parametrize(
    ("rows", "slots", "slices"), [(10**9, 800, 4_000), (10**9, 3, 4_095), (200_000, 800, 3), (10, 4, 1)]
)
def test_all_slots_write_equally_many_slices_of_a_large_table(rows: int, slots: int, slices: int) -> None:
    assert number_of_slices(rows, slots) == slices


def test_a_chunk_is_a_commit_period_s_rows_once_the_rate_is_known() -> None:
    plan = ChunkPlan(slice_rows=[1_000] * 1_000, slots=8, commit_every_s=900)
    first = plan.next(None)
    assert first is not None
    assert first.rows == pytest.approx(900 * 8, rel=0.1), "before anyone knows, a row a second and slot"
    sizes = []
    while (chunk := plan.next(100.0)) is not None:
        sizes.append(chunk.rows)
    assert sizes[0] <= 4 * first.rows, "it grows by steps: the first rates are rough"
    assert 90_000 in sizes


def test_a_chunk_is_no_smaller_than_what_keeps_the_engines_fed() -> None:
    plan = ChunkPlan(slice_rows=[1_000] * 1_000, slots=8, commit_every_s=10)
    first, second = plan.next(None), plan.next(1.0, at_least=50_000)
    assert first is not None
    assert second is not None
    assert (first.rows, second.rows) == (2_000, 50_000)
    while (chunk := plan.next(1.0, at_least=300_000)) is not None:
        assert chunk.rows >= 300_000, "the last one, too"


@given(
    rows=st.integers(1, 10**7),
    slots=st.integers(1, 512),
    executors=st.integers(1, 64),
    engine_rows=st.none() | st.integers(1, 10**5),
    is_last=st.booleans(),
)
def test_every_slot_has_work_while_there_are_rows_for_it(
    rows: int, slots: int, executors: int, engine_rows: int | None, is_last: bool
) -> None:
    cut = Slots(total=slots, per_executor=max(1, slots // executors))
    partitions = cut.partitions_for(rows, engine_rows=engine_rows, is_last=is_last)
    assert min(rows, slots) <= partitions <= max(1, 2 * slots)


@pytest.mark.parametrize(("slots", "partition_rows"), [(1, 4_000), (2, 4_000), (4, 1_334), (8, 572)])
def test_the_fewer_slots_the_larger_the_partitions(slots: int, partition_rows: int) -> None:
    cut = Slots(total=2 * slots, per_executor=slots)
    assert cut.fed_partition_rows(1_000) == partition_rows
    assert cut.fed_partition_rows(None) is None
    chunk_rows = cut.total * partition_rows
    assert cut.partitions_for(chunk_rows, engine_rows=1_000) == cut.total
    assert cut.partitions_for(100 * chunk_rows, engine_rows=1_000) == 2 * cut.total
    # The table's end is evened out between executors; with one there is nothing to even out.
    assert cut.partitions_for(chunk_rows, engine_rows=1_000, is_last=True) == 2 * cut.total
    alone = Slots(total=slots, per_executor=slots)
    assert alone.partitions_for(slots * partition_rows, engine_rows=1_000, is_last=True) == slots
    assert (cut.executors, alone.executors) == (2, 1)


def test_picked_slices_keep_their_order_and_neighbours_stay_together() -> None:
    spans = [SliceSpan(path="a", first=0, end=4), SliceSpan(path="b", first=2, end=5)]
    assert pick_slices(spans, range(7)) == spans
    assert pick_slices(spans, [6, 4, 1, 2]) == [
        SliceSpan(path="a", first=1, end=3),
        SliceSpan(path="b", first=2, end=3),
        SliceSpan(path="b", first=4, end=5),
    ]
    assert pick_slices(spans, []) == []
