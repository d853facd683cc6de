"""The host's blocks where each group of layers has block tables of its own, and blocks that left a window are free.

A request's replica has a list of blocks for each group; those of windows begin where its next token's window does.
Nothing is shared between requests. Of a prompt's part, only the blocks that the tokens after it need are stored.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from pipemax.domain.kv_groups import KvGroups
from pipemax.domain.units import HostBlockId, ceil_div
from pipemax.vllm_ext.scheduler.host_blocks import HostBlocks, Replicated


@dataclass(slots=True)
class _GroupTables:
    blocks: list[list[HostBlockId]]
    """By group, from its first kept block on."""
    num_skipped: int = 0
    """Blocks before those of the windows."""
    num_tokens: int = 0
    saved_tokens: int = 0
    """The sequence's tokens when its partly filled last blocks were saved, if they were."""


class WindowedHostBlocks(HostBlocks):
    """``HostBlocks`` with tables for several groups. The first of them are those with full attention."""

    def __init__(
        self, *, num_blocks: int, block_tokens: int, groups: KvGroups, stores_tokens: bool = False
    ) -> None:
        super().__init__(num_blocks=num_blocks, block_tokens=block_tokens, stores_tokens=stores_tokens)
        self._groups = groups
        self._group_tables: dict[str, _GroupTables] = {}

    def num_tokens(self, request_id: str) -> int:
        return self._group_tables[request_id].num_tokens

    def blocks(self, request_id: str) -> Sequence[HostBlockId]:
        tables = self._group_tables[request_id]
        begin = self._skipped(tables.num_tokens) - tables.num_skipped
        full, windows = tables.blocks[: self._groups.full], tables.blocks[self._groups.full :]
        return [*chain.from_iterable(full), *chain.from_iterable(table[begin:] for table in windows)]

    def num_shared(self, request_id: str) -> int:
        return 0

    def extend(self, request_id: str, num_tokens: int, block_hashes: Sequence[bytes]) -> list[Replicated]:
        size = self._block_tokens
        tables = self._group_tables.get(request_id)
        if tables is None:
            tables = _GroupTables([[] for _ in range(self._groups.count)])
            self._group_tables[request_id] = tables
        skipped = self._skipped(num_tokens)
        self._drop_skipped(tables, skipped)
        stores: list[Replicated] = []
        for group, blocks in enumerate(tables.blocks):
            first = skipped if group >= self._groups.full else 0
            while first + len(blocks) < ceil_div(num_tokens, size):
                blocks.append(self._take(blocks))
            end = num_tokens // size + (self.stores_tokens and num_tokens % size > 0)
            for index in range(max(first, tables.num_tokens // size), end):
                slots = self._slots(tables.num_tokens, num_tokens, index)
                stores.append(Replicated(index, blocks[index - first], *slots, group))
        if self.stores_tokens:
            tables.saved_tokens = num_tokens
        tables.num_tokens = num_tokens
        return stores

    def extend_last(self, request_id: str, num_tokens: int) -> tuple[HostBlockId, int, int] | None:
        tables = self._group_tables.get(request_id)
        if tables is None or self.stores_tokens:
            return None
        first_slot, num_slots = tables.num_tokens % self._block_tokens, num_tokens - tables.num_tokens
        if not self._stays_in_block(first_slot, num_slots):
            return None
        tables.num_tokens = num_tokens
        return tables.blocks[0][-1], first_slot, num_slots

    def save_last(self, request_id: str) -> Sequence[Replicated]:
        tables, size = self._group_tables[request_id], self._block_tokens
        if tables.num_tokens % size == 0 or tables.saved_tokens == tables.num_tokens:
            return ()
        tables.saved_tokens = tables.num_tokens
        index = tables.num_tokens // size
        return [Replicated(index, blocks[-1], 0, size, group) for group, blocks in enumerate(tables.blocks)]

    def release(self, request_id: str) -> None:
        tables = self._group_tables.pop(request_id, None)
        for block in chain.from_iterable(tables.blocks if tables else ()):
            self._drop(block)

    def _skipped(self, num_tokens: int) -> int:
        return self._groups.skipped_blocks(num_tokens, self._block_tokens)

    def _drop_skipped(self, tables: _GroupTables, skipped: int) -> None:
        num_more = skipped - tables.num_skipped
        for blocks in tables.blocks[self._groups.full :]:
            for block in blocks[:num_more]:
                self._drop(block)
            del blocks[:num_more]
        tables.num_skipped = skipped

    def check_integrity(self) -> None:
        counted = [
            block for tables in self._group_tables.values() for block in chain.from_iterable(tables.blocks)
        ]
        assert len(counted) == len({*counted})
        assert {*counted} == self._num_references.keys()
        assert len(self._free) + len(counted) == self.num_blocks, (len(self._free), len(counted))
        for tables in self._group_tables.values():
            end = ceil_div(tables.num_tokens, self._block_tokens)
            lengths = [len(blocks) for blocks in tables.blocks]
            firsts = [0] * self._groups.full + [tables.num_skipped] * self._groups.window
            assert lengths == [end - first for first in firsts], (tables, end)
