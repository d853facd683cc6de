"""Track which host block holds which KV: the scheduler's half of the host pool, with ids and counts but no bytes.

A request's replica is a table of host blocks, next to its GPU block table. A block that is full has a content hash
(vLLM's, which covers every token before it); equal hashes share one host block, counted by reference, so a template's
prefix is replicated once. A block is released with the last request that uses it; nothing is kept beyond that.

A block is stored when it is full. A request's last block, partly filled, is saved when the request is evicted: that is
one block per victim, where writing every token through would copy the block at every step. On GPUs a kernel stores
single tokens instead (``stores_tokens``), and an eviction copies nothing.

An id may be handed out again at once: the copies that read or write it belong to an earlier step, and steps wait for
the copies of the steps before them (``pipemax.transfer.orchestrator``).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain, takewhile
from typing import NamedTuple

from pipemax.domain.units import HostBlockId, ceil_div
from pipemax.vllm_ext.scheduler.free_blocks import FreeBlocks


class Replicated(NamedTuple):
    """One of a request's blocks, or some slots of it, to be copied to the host."""

    block_index: int
    """Index within the request's sequence."""
    host_block: HostBlockId
    first_slot: int
    num_slots: int
    group: int = 0
    """Of layers, where there are several."""


@dataclass(slots=True)
class Table:
    """One request's replica."""

    blocks: list[HostBlockId] = field(default_factory=list)
    num_tokens: int = 0
    saved_tokens: int = 0
    """The sequence's tokens when its partly filled last block was saved, if it was."""
    groups: list[list[HostBlockId]] = field(default_factory=list)
    """Where there are several groups, the blocks of each from its first kept one on; ``blocks`` is the first."""
    num_skipped: int = 0
    """Blocks before those of the windows."""


class HostBlocks:
    """The requests' tables, the reference counts and the free list. Not thread-safe."""

    def __init__(self, *, num_blocks: int, block_tokens: int, stores_tokens: bool = False) -> None:
        self.num_blocks = num_blocks
        self._block_tokens = block_tokens
        self.stores_tokens = stores_tokens
        self._free = FreeBlocks(num_blocks)
        self._num_references: dict[HostBlockId, int] = {}
        self._by_hash: dict[bytes, HostBlockId] = {}
        self._hashes: dict[HostBlockId, bytes] = {}
        self._tables: dict[str, Table] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    def num_tokens(self, request_id: str) -> int:
        """Return the tokens of a request's replica; ``KeyError`` if it has none."""
        return self._tables[request_id].num_tokens

    def blocks(self, request_id: str) -> Sequence[HostBlockId]:
        """Return a request's replica, in order of its sequence; ``KeyError`` if it has none."""
        return self._tables[request_id].blocks

    def num_shared(self, request_id: str) -> int:
        """Return how many leading blocks of a request's replica other requests share; ``KeyError`` if it has none."""
        blocks = self._tables[request_id].blocks
        return sum(1 for _ in takewhile(lambda block: self._num_references[block] > 1, blocks))

    def extend(self, request_id: str, num_tokens: int, block_hashes: Sequence[bytes]) -> list[Replicated]:
        """Grow a request's replica to ``num_tokens``. Return what must be copied to the host.

        That is the blocks that are full now and not on the host yet, and, if single tokens are stored, the new slots
        of the last block. ``block_hashes``: those of its full blocks, as far as they are known. ``PoolExhaustedError``
        without free blocks; that ends the engine, because the controller never counts fewer than are used.
        """
        size = self._block_tokens
        table = self._tables.get(request_id)
        if table is None:
            table = self._tables[request_id] = Table()
        stores: list[Replicated] = []
        for index in range(table.num_tokens // size, num_tokens // size):
            content = block_hashes[index] if index < len(block_hashes) else None
            shared = self._by_hash.get(content) if content is not None else None
            if index < len(table.blocks) and shared is not None:
                self._drop(table.blocks.pop())  # it was partly filled, and is now equal to another one
            if index == len(table.blocks):
                table.blocks.append(self._take(table.blocks) if shared is None else self._share(shared))
            if shared is None:
                stores.append(self._part(table, index, num_tokens))
                if content is not None:
                    self._by_hash[content] = table.blocks[index]
                    self._hashes[table.blocks[index]] = content
        if ceil_div(num_tokens, size) > len(table.blocks):  # so that an eviction never lacks a block
            table.blocks.append(self._take(table.blocks))
        if self.stores_tokens:
            if num_tokens % size:
                stores.append(self._part(table, num_tokens // size, num_tokens))
            table.saved_tokens = num_tokens
        table.num_tokens = num_tokens
        return stores

    def extend_last(self, request_id: str, num_tokens: int) -> tuple[HostBlockId, int, int] | None:
        """Grow a replica to ``num_tokens`` within its last block, which stays partly filled: what most steps do.

        Return that block, its first new slot and the number of new slots; None, with nothing changed, where ``extend``
        is needed. Only where single tokens are stored must they be copied.
        """
        table = self._tables.get(request_id)
        if table is None:
            return None
        first_slot, num_slots = table.num_tokens % self._block_tokens, num_tokens - table.num_tokens
        if not 0 < first_slot < self._block_tokens - num_slots:  # it begins a block, or fills its last one
            return None
        table.num_tokens = num_tokens
        if self.stores_tokens:
            table.saved_tokens = num_tokens
        return table.blocks[-1], first_slot, num_slots

    def _part(self, table: Table, index: int, num_tokens: int) -> Replicated:
        """Return what the host lacks of one block of a sequence that grows to ``num_tokens``."""
        return Replicated(index, table.blocks[index], *self._slots(table.num_tokens, num_tokens, index))

    def _slots(self, before: int, num_tokens: int, index: int) -> tuple[int, int]:
        """Return the first slot of a block to store, and how many, where a sequence grows from ``before`` tokens."""
        size = self._block_tokens
        first_slot = max(0, before - index * size) if self.stores_tokens else 0
        return first_slot, min(size, num_tokens - index * size) - first_slot

    def save_last(self, request_id: str) -> Sequence[Replicated]:
        """Return an evicted request's last block, if that is partly filled and has grown since it was saved."""
        table = self._tables[request_id]
        if table.num_tokens % self._block_tokens == 0 or table.saved_tokens == table.num_tokens:
            return ()
        table.saved_tokens = table.num_tokens
        index, size = table.num_tokens // self._block_tokens, self._block_tokens
        groups = table.groups or [table.blocks]
        return tuple(Replicated(index, blocks[-1], 0, size, group) for group, blocks in enumerate(groups))

    def release(self, request_id: str) -> None:
        """Release the blocks of a request that is gone; an unknown one is ignored."""
        table = self._tables.pop(request_id, Table())
        for block in chain.from_iterable(table.groups or [table.blocks]):
            self._drop(block)

    def _drop(self, block: HostBlockId) -> None:
        self._num_references[block] -= 1
        if self._num_references[block] == 0:
            del self._num_references[block]
            content = self._hashes.pop(block, None)
            if content is not None:
                del self._by_hash[content]
            self._free.add(block)

    def _share(self, block: HostBlockId) -> HostBlockId:
        self._num_references[block] += 1
        return block

    def _take(self, blocks: Sequence[HostBlockId]) -> HostBlockId:
        """Take a block for the end of a sequence that has these."""
        block = HostBlockId(self._free.take(blocks[-1] if blocks else None))
        self._num_references[block] = 1
        return block

    def check_integrity(self) -> None:
        """Assert that free and held blocks make up the pool, and that references match the tables."""
        counted: dict[HostBlockId, int] = {}
        for table in self._tables.values():
            for block in table.blocks:
                counted[block] = counted.get(block, 0) + 1
            assert len(table.blocks) == ceil_div(table.num_tokens, self._block_tokens), table
        assert counted == self._num_references, (counted, self._num_references)
        assert len(self._free) + len(counted) == self.num_blocks, (len(self._free), len(counted))
        assert not any(block in self._free for block in counted)
        assert {block: content for content, block in self._by_hash.items()} == self._hashes
        assert self._hashes.keys() <= counted.keys()
