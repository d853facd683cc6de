"""Copies as arrays: small messages, and the same as tuples to whoever reads them."""

import pickle
import pickletools

import numpy as np

from pipemax.transfer.commands import BlockPrefetch, CopyRows, StepCopies


def rows(count: int) -> CopyRows[BlockPrefetch]:
    return CopyRows(BlockPrefetch, np.arange(2 * count, dtype=np.int32).reshape(-1, 2))


def test_a_step_s_message_is_made_of_as_many_parts_however_many_copies_it_has() -> None:
    def num_parts(count: int) -> int:
        message = pickle.dumps(StepCopies(prefetches=rows(count)), pickle.HIGHEST_PROTOCOL)
        return sum(1 for _ in pickletools.genops(message))

    assert num_parts(1_600) == num_parts(2)


def test_rows_survive_the_way_to_another_process_and_read_like_tuples() -> None:
    read = pickle.loads(pickle.dumps(StepCopies(prefetches=rows(3)))).prefetches
    expected = [BlockPrefetch(0, 1), BlockPrefetch(2, 3), BlockPrefetch(4, 5)]
    assert [*read] == expected
    assert read[1] == expected[1]
    assert [*read[1:]] == expected[1:]
    assert (np.asarray(read) == expected).all()
    assert not rows(0)
