"""When the next chunk is submitted, by what Spark says of those in flight."""

from hypothesis import given
from hypothesis import strategies as st

from pipemax_spark.rows.turns import may_submit
from pipemax_spark.spark.jobs import ChunkTasks


@st.composite
def tasks(draw: st.DrawFn) -> ChunkTasks:
    total = draw(st.integers(0, 8))
    completed = draw(st.integers(0, total))
    return ChunkTasks(total=total, running=draw(st.integers(0, total - completed)), completed=completed)


STRAGGLER = ChunkTasks(total=8, running=1, completed=7)
ALL_BEGUN = ChunkTasks(total=8, running=6, completed=2)
SOME_WAIT = ChunkTasks(total=8, running=7)


def test_the_first_chunk_waits_for_nothing() -> None:
    assert may_submit([], is_room_known=False)


def test_the_second_waits_until_the_first_holds_slots_and_engines_have_told_their_room() -> None:
    assert not may_submit([ChunkTasks()], is_room_known=True)
    assert not may_submit([SOME_WAIT], is_room_known=False)
    assert may_submit([SOME_WAIT], is_room_known=True)
    assert may_submit([STRAGGLER], is_room_known=False), (
        "tasks have ended, so nobody waits for engines to load"
    )


def test_the_third_waits_until_no_task_of_the_two_waits_for_a_slot() -> None:
    assert may_submit([STRAGGLER, ALL_BEGUN], is_room_known=True)
    assert not may_submit([STRAGGLER, SOME_WAIT], is_room_known=True)
    assert not may_submit([STRAGGLER, ChunkTasks()], is_room_known=True)


@given(in_flight=st.lists(tasks(), max_size=5), is_room_known=st.booleans())
def test_no_chunk_is_submitted_behind_one_that_holds_no_slot(
    in_flight: list[ChunkTasks], is_room_known: bool
) -> None:
    if may_submit(in_flight, is_room_known=is_room_known) and in_flight:
        assert in_flight[-1].running + in_flight[-1].completed > 0
        if len(in_flight) > 1:
            assert not any(chunk.has_waiting for chunk in in_flight)


@given(in_flight=st.lists(tasks(), min_size=1, max_size=3))
def test_the_next_chunk_is_submitted_in_the_end(in_flight: list[ChunkTasks]) -> None:
    begun = [ChunkTasks(total=max(1, chunk.total), completed=max(1, chunk.total)) for chunk in in_flight]
    assert may_submit(begun, is_room_known=False)
