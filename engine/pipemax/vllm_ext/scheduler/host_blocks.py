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

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipemax.domain.units import GpuBlockId, HostBlockId, ceil_div
from pipemax.transfer.commands import Int32s
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


def int32s() -> "array[int]":
    """Return an empty array, of which NumPy makes another one without a look at each of its numbers."""
    return array("i")


class SequenceEnds:
    """Where each replica ends, in one array, so that a step finds the ends of hundreds of decodes at once."""

    def __init__(self) -> None:
        # (slots, 3): tokens, last block of the replica, the block next to it on the GPU. Slot 0 is nobody's.
        self.rows: Int32s = np.zeros((1024, 3), dtype=np.int32)
        self.slots: dict[str, int] = {}
        self._free_slots: list[int] = []

    def add(self, request_id: str) -> int:
        """Return a slot for a request; its row begins with zeros."""
        slot = self._free_slots.pop() if self._free_slots else len(self.slots) + 1
        if slot == len(self.rows):
            self.rows = np.concatenate([self.rows, np.zeros_like(self.rows)])
        self.slots[request_id] = slot
        self.rows[slot] = 0
        return slot

    def remove(self, request_id: str) -> None:
        self._free_slots.append(self.slots.pop(request_id))


@dataclass(slots=True)
class Table:
    """One request's replica."""

    ends: SequenceEnds
    slot: int
    """Of ``ends``."""
    blocks: "array[int]" = field(default_factory=int32s)
    saved_tokens: int = 0
    """The sequence's tokens when its partly filled last block was saved, if it was; unless tokens are stored."""
    groups: list["array[int]"] = field(default_factory=list)
    """Where there are several groups, the blocks of each from its first kept one on; ``blocks`` is the first."""
    num_skipped: int = 0
    """Blocks before those of the windows."""

    @property
    def num_tokens(self) -> int:
        return int(self.ends.rows[self.slot, 0])


class HostBlocks:
    """The requests' tables, the reference counts and the free list. Not thread-safe."""

    def __init__(self, *, num_blocks: int, block_tokens: int, stores_tokens: bool = False) -> None:
        self.num_blocks = num_blocks
        self._block_tokens = block_tokens
        self.stores_tokens = stores_tokens
        self._free = FreeBlocks(num_blocks)
        self._num_references: dict[int, int] = {}
        self._by_hash: dict[bytes, int] = {}
        self._hashes: dict[int, bytes] = {}
        self._tables: dict[str, Table] = {}
        self._ends = SequenceEnds()

    @property
    def num_free(self) -> int:
        return len(self._free)

    def num_tokens(self, request_id: str) -> int:
        """Return the tokens of a request's replica; ``KeyError`` if it has none."""
        return self._tables[request_id].num_tokens

    def blocks(self, request_id: str) -> "array[int]":
        """Return a request's replica, in order of its sequence; ``KeyError`` if it has none."""
        return self._tables[request_id].blocks

    def num_shared(self, request_id: str) -> int:
        """Return how many leading blocks of a request's replica other requests share; ``KeyError`` if it has none."""
        references, num_shared = self._num_references, 0
        for block in self._tables[request_id].blocks:
            if references[block] == 1:
                break
            num_shared += 1
        return num_shared

    def extend(self, request_id: str, num_tokens: int, block_hashes: Sequence[bytes]) -> list[Replicated]:
        """Grow a request's replica to ``num_tokens``. Return what must be copied to the host.

        That is the blocks that are full now and not on the host yet, and, if single tokens are stored, the new slots
        of the last block. ``block_hashes``: those of its full blocks, as far as they are known. ``PoolExhaustedError``
        without free blocks; that ends the engine, because the controller never counts fewer than are used.
        """
        size = self._block_tokens
        table = self._tables.get(request_id) or self._begin(request_id)
        before = table.num_tokens
        stores: list[Replicated] = []
        for index in range(before // size, num_tokens // size):
            content = block_hashes[index] if index < len(block_hashes) else None
            shared = self._by_hash.get(content) if content is not None else None
            if index < len(table.blocks) and shared is not None:
                self._drop(table.blocks.pop())  # it was partly filled, and is now equal to another one
            if index == len(table.blocks):
                table.blocks.append(self._take(table.blocks) if shared is None else self._share(shared))
            if shared is None:
                slots = self._slots(before, num_tokens, index)
                stores.append(Replicated(index, HostBlockId(table.blocks[index]), *slots))
                if content is not None:
                    self._by_hash[content] = table.blocks[index]
                    self._hashes[table.blocks[index]] = content
        if ceil_div(num_tokens, size) > len(table.blocks):  # so that an eviction never lacks a block
            table.blocks.append(self._take(table.blocks))
        if self.stores_tokens and num_tokens % size:
            slots = self._slots(before, num_tokens, num_tokens // size)
            stores.append(Replicated(num_tokens // size, HostBlockId(table.blocks[-1]), *slots))
        row = self._ends.rows[table.slot]
        row[0] = num_tokens
        if table.blocks:
            row[1] = table.blocks[-1]
        return stores

    def note_gpu_end(self, request_id: str, block: GpuBlockId) -> None:
        """Note the GPU's block next to a replica's last one, which is partly filled. Call it when that changes."""
        self._ends.rows[self._ends.slots[request_id], 2] = block

    def extend_within(self, num_new_tokens: Mapping[str, int]) -> tuple[Int32s, NDArray[np.bool_]]:
        """Grow each replica that gets one token and stays within its last block: what most decodes do.

        Return the stores of these tokens, in rows of ``TokenStore``, and whether each of the requests was grown. Of
        the others nothing has changed: they need ``extend``. Every call counts here, hence the arrays.
        """
        slot_of = self._ends.slots.get
        slots = np.array(
            [slot_of(request_id, 0) if num == 1 else 0 for request_id, num in num_new_tokens.items()],
            dtype=np.int64,
        )
        places = self._ends.rows[slots, 0] % self._block_tokens
        # It neither begins a block nor fills one.
        is_within = (places > 0) & (places < self._block_tokens - 1)
        slots = slots[is_within]
        self._ends.rows[slots, 0] += 1
        stores = np.ones((len(slots) if self.stores_tokens else 0, 4), dtype=np.int32)
        if self.stores_tokens:
            stores[:, :2] = self._ends.rows[slots, :0:-1]
            stores[:, 2] = places[is_within]
        return stores, is_within

    def _begin(self, request_id: str) -> Table:
        table = self._tables[request_id] = Table(self._ends, self._ends.add(request_id))
        return table

    def _slots(self, before: int, num_tokens: int, index: int) -> tuple[int, int]:
        """Return the first slot of a block to store, and how many, where a sequence grows from ``before`` tokens."""
        size = self._block_tokens
        first_slot = max(0, before - index * size) if self.stores_tokens else 0
        return first_slot, min(size, num_tokens - index * size) - first_slot

    def save_last(self, request_id: str) -> Sequence[Replicated]:
        """Return an evicted request's last block, if that is partly filled and has grown since it was saved."""
        if self.stores_tokens:
            return ()
        table, size = self._tables[request_id], self._block_tokens
        num_tokens = table.num_tokens
        if num_tokens % size == 0 or table.saved_tokens == num_tokens:
            return ()
        table.saved_tokens = num_tokens
        index = num_tokens // size
        groups = table.groups or [table.blocks]
        return tuple(
            Replicated(index, HostBlockId(blocks[-1]), 0, size, group) for group, blocks in enumerate(groups)
        )

    def release(self, request_id: str) -> None:
        """Release the blocks of a request that is gone; an unknown one is ignored."""
        table = self._tables.pop(request_id, None)
        if table is None:
            return
        self._ends.remove(request_id)
        for block in chain.from_iterable(table.groups or [table.blocks]):
            self._drop(block)

    def _drop(self, block: int) -> None:
        self._num_references[block] -= 1
        if self._num_references[block] == 0:
            del self._num_references[block]
            content = self._hashes.pop(block, None)
            if content is not None:
                del self._by_hash[content]
            self._free.add(block)

    def _share(self, block: int) -> int:
        self._num_references[block] += 1
        return block

    def _take(self, blocks: Sequence[int]) -> int:
        """Take a block for the end of a sequence that has these."""
        block = self._free.take(blocks[-1] if blocks else None)
        self._num_references[block] = 1
        return block

    def check_integrity(self) -> None:
        """Assert that free and held blocks make up the pool, and that references match the tables."""
        counted: dict[int, int] = {}
        for table in self._tables.values():
            for block in table.blocks:
                counted[block] = counted.get(block, 0) + 1
            assert len(table.blocks) == ceil_div(table.num_tokens, self._block_tokens), table
        assert counted == self._num_references, (counted, self._num_references)
        assert len(self._free) + len(counted) == self.num_blocks, (len(self._free), len(counted))
        assert not any(block in self._free for block in counted)
        assert {block: content for content, block in self._by_hash.items()} == self._hashes
        assert self._hashes.keys() <= counted.keys()
