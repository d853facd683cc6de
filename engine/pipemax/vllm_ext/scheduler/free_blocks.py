"""Hand out a pool's free blocks so that a sequence's blocks are neighbours: copies of neighbours are one copy."""

from pipemax.domain.errors import PoolExhaustedError

_ROOM = 32
"""Blocks of an empty pool between the beginnings of two sequences: what the first may grow into."""
_LOOKED_AT = 16
"""Runs of free blocks of which the longest is begun."""


class FreeBlocks:
    """The free blocks of a host pool. A call takes microseconds, however full the pool is. Not thread-safe."""

    def __init__(self, num_blocks: int) -> None:
        self._is_free = bytearray(b"\1" * num_blocks)
        self._num_free = num_blocks
        self._next = 0

    def __len__(self) -> int:
        """Return the number of free blocks."""
        return self._num_free

    def __contains__(self, block: int) -> bool:
        return bool(self._is_free[block])

    def take(self, after: int | None = None) -> int:
        """Return a block that is free no longer: the one behind ``after``, or else one before other free ones.

        ``PoolExhaustedError`` if none is free.
        """
        block = len(self._is_free) if after is None else after + 1
        if block >= len(self._is_free) or not self._is_free[block]:
            block = self._longest_run()
        self._is_free[block] = 0
        self._num_free -= 1
        return block

    def _longest_run(self) -> int:
        """Return the first block of the longest of some runs of free blocks; the next call looks behind it."""
        is_free, best, longest = self._is_free, -1, 0
        begin = is_free.find(1, self._next)
        for _ in range(_LOOKED_AT):
            if begin < 0:
                begin = is_free.find(1)
                if begin < 0:
                    raise PoolExhaustedError(f"all {len(is_free)} host blocks are in use")
            end = is_free.find(0, begin, begin + _ROOM)
            length = _ROOM if end < 0 else end - begin
            if length > longest:
                best, longest = begin, length
            if length == _ROOM:
                break
            begin = is_free.find(1, begin + length)
        self._next = best + longest
        return best

    def add(self, block: int) -> None:
        """Free a block that was taken."""
        assert not self._is_free[block], f"host block {block} is free already"
        self._is_free[block] = 1
        self._num_free += 1
