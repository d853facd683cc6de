"""The host's blocks where each group of layers has block tables of its own, and blocks that left a window are free.

A request's replica has a list of blocks for each group; those of windows begin where its next token's window does.
Nothing is shared between requests. Of a prompt's part, only the blocks that the tokens after it need are stored.
"""

from array import array
from collections.abc import Mapping, Sequence
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from pipemax.domain.kv_groups import KvGroups
from pipemax.domain.units import HostBlockId, ceil_div
from pipemax.transfer.commands import Int32s
from pipemax.vllm_ext.scheduler.host_blocks import HostBlocks, Replicated, Table, int32s


class WindowedHostBlocks(HostBlocks):
    """``HostBlocks`` with tables for several groups. The first of them are those with full attention."""

    def __init__(
        self, *, num_blocks: int, block_tokens: int, groups: KvGroups, stores_tokens: bool = False
    ) -> None:
        super().__init__(num_blocks=num_blocks, block_tokens=block_tokens, stores_tokens=stores_tokens)
        self._groups = groups

    def blocks(self, request_id: str) -> "array[int]":
        table = self._tables[request_id]
        begin = self._skipped(table.num_tokens) - table.num_skipped
        full, windows = table.groups[: self._groups.full], table.groups[self._groups.full :]
        return array("i", chain(*full, *(blocks[begin:] for blocks in windows)))

    def num_shared(self, request_id: str) -> int:
        return 0

    def extend(self, request_id: str, num_tokens: int, block_hashes: Sequence[bytes]) -> list[Replicated]:
        size = self._block_tokens
        table = self._tables.get(request_id) or self._begin(request_id)
        before = table.num_tokens
        skipped = self._skipped(num_tokens)
        self._drop_skipped(table, skipped)
        stores: list[Replicated] = []
        for group, blocks in enumerate(table.groups):
            first = skipped if group >= self._groups.full else 0
            while first + len(blocks) < ceil_div(num_tokens, size):
                blocks.append(self._take(blocks))
            end = num_tokens // size + (self.stores_tokens and num_tokens % size > 0)
            for index in range(max(first, before // size), end):
                slots = self._slots(before, num_tokens, index)
                stores.append(Replicated(index, HostBlockId(blocks[index - first]), *slots, group))
        self._ends.rows[table.slot, 0] = num_tokens
        return stores

    def extend_within(self, num_new_tokens: Mapping[str, int]) -> tuple[Int32s, NDArray[np.bool_]]:
        # A token is stored for each group: ``extend`` does that.
        return super().extend_within(
            dict.fromkeys(num_new_tokens, 0) if self.stores_tokens else num_new_tokens
        )

    def _begin(self, request_id: str) -> Table:
        table = super()._begin(request_id)
        table.groups = [table.blocks, *(int32s() for _ in range(self._groups.count - 1))]
        return table

    def _skipped(self, num_tokens: int) -> int:
        return self._groups.skipped_blocks(num_tokens, self._block_tokens)

    def _drop_skipped(self, table: Table, skipped: int) -> None:
        num_more = skipped - table.num_skipped
        for blocks in table.groups[self._groups.full :]:
            for block in blocks[:num_more]:
                self._drop(block)
            del blocks[:num_more]
        table.num_skipped = skipped

    def check_integrity(self) -> None:
        counted = [block for table in self._tables.values() for blocks in table.groups for block in blocks]
        assert len(counted) == len({*counted})
        assert {*counted} == self._num_references.keys()
        assert len(self._free) + len(counted) == self.num_blocks, (len(self._free), len(counted))
        for table in self._tables.values():
            end = ceil_div(table.num_tokens, self._block_tokens)
            lengths = [len(blocks) for blocks in table.groups]
            firsts = [0] * self._groups.full + [table.num_skipped] * self._groups.window
            assert lengths == [end - first for first in firsts], (table, end)
