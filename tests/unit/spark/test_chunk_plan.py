"""Slices joined into chunks: each slice once, whatever the rates."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipemax_spark.chunks import ChunkPlan, number_of_slices, partition_keys
from pipemax_spark.slots import partitions_for


@given(
    rows=st.integers(1, 2_000_000),
    slots=st.integers(1, 64),
    rates=st.lists(st.none() | st.floats(0.0, 1e6), max_size=30),
)
def test_chunks_follow_each_other_without_gap_or_overlap(
    rows: int, slots: int, rates: list[float | None]
) -> None:
    slices = number_of_slices(rows, slots)
    plan = ChunkPlan(rows=rows, slices=slices, slots=slots, commit_every_s=900)
    given_rates = iter(rates)
    while plan.next(next(given_rates, None)) is not None:
        pass
    chunks = plan.chunks
    assert [chunk.number for chunk in chunks] == list(range(len(chunks)))
    assert [chunk.first_slice for chunk in chunks] == [0, *(chunk.end_slice for chunk in chunks[:-1])]
    assert chunks[-1].end_slice == slices
    assert all(chunk.end_slice > chunk.first_slice for chunk in chunks)


def test_a_chunk_is_a_commit_period_s_rows_once_the_rate_is_known() -> None:
    plan = ChunkPlan(rows=1_000_000, slices=1_000, slots=8, commit_every_s=900)
    first = plan.next(None)
    assert first is not None
    assert 1_000 <= first.rows <= 4_000
    sizes = []
    while (chunk := plan.next(100.0)) is not None:
        sizes.append(chunk.rows)
    assert sizes[0] <= 4 * first.rows, "it grows by steps: the first rates are rough"
    assert 90_000 in sizes


@given(rows=st.integers(1, 10**7), slots=st.integers(1, 512))
def test_every_slot_has_work_while_there_are_rows_for_it(rows: int, slots: int) -> None:
    partitions = partitions_for(rows, slots)
    assert min(rows, slots) <= partitions <= max(1, 2 * slots)


@pytest.mark.parametrize("partitions", [1, 2, 7, 64, 1000])
def test_there_is_a_key_for_each_partition(partitions: int) -> None:
    keys = partition_keys(partitions)
    assert len(set(keys)) == partitions
