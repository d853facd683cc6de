"""Decide when the next chunk may be submitted. Pure: the input is Spark's report on the chunks in flight.

Spark gives free slots to the chunk that was submitted first. As a rule two chunks are in flight: one whose last rows
decode, and the next, whose tasks take the slots that become free. If one task of a chunk takes far longer than the
others, on a slow node for instance, its chunk stays in flight for that long. Then more chunks may be in flight: as soon
as every task of all chunks in flight holds a slot or has ended, the next slot that becomes free would have nothing to
do.
"""

from collections.abc import Sequence

from pipemax_spark.spark.jobs import ChunkTasks

_NORMALLY_IN_FLIGHT = 2


def may_submit(in_flight: Sequence[ChunkTasks], *, is_room_known: bool) -> bool:
    """Tell whether the chunk after those in flight, of which the last was submitted last, may be submitted.

    ``is_room_known``: an engine has reported how many rows it has room for, which sets the size of the next chunk.
    """
    if not in_flight:
        return True
    last = in_flight[-1]
    if not last.completed and not (last.running and is_room_known):
        return False
    return len(in_flight) < _NORMALLY_IN_FLIGHT or not any(tasks.has_waiting for tasks in in_flight)
