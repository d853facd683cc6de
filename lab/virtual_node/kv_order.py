"""Check that every step and every copy finds the KV that it should, in virtual time.

A stage's blocks hold no bytes but what they stand for, and this twice. *In order*: what each block holds once
everything submitted so far is done, one after the other; there, a step must find its own request's KV. *In time*:
which of the writes submitted are done, and what is being read and written now. A step or copy must find done, when
it begins, the last write that was submitted before it, and none that was submitted later; until it ends, nothing else
may write what it reads.

    in order   identity, filled slots, base (the last write from slot 0 on), version (the last write)
    in time    base and version that are done, readers, the slots being read and written

So it needs no model of fences: lanes that wait as they should keep to this, others are found, by name.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipemax.domain.errors import PipeMaxError
from pipemax.transfer.cuda.device import Pool

Ints = NDArray[np.int64]

_NOTHING = 0
_NO_SLOT = 1 << 14
_MAX_LABELS = 1 << 14


class WrongKvError(PipeMaxError):
    """A step or a copy met KV that is not the one that it should have met."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepKv:
    """The KV that a step reads and writes on each stage; arrays with an entry for each block."""

    read_blocks: Ints
    read_identities: Ints
    """See ``Sequences``."""
    read_ends: Ints
    """The slots ``[0, end)`` are read."""
    read_requests: Sequence[str]
    """Who reads each block."""
    written_blocks: Ints
    written_identities: Ints
    written_firsts: Ints
    """The slots ``[first, end)`` are written."""
    written_ends: Ints


class _BlockPool:
    """One of a stage's pools."""

    def __init__(self, pool: Pool, num_blocks: int) -> None:
        self.pool = pool
        self.identity = np.full(num_blocks, _NOTHING, dtype=np.int64)
        self.filled = np.zeros(num_blocks, dtype=np.int16)
        self.base = np.zeros(num_blocks, dtype=np.int32)
        self.version = np.zeros(num_blocks, dtype=np.int32)
        self.done_base = np.zeros(num_blocks, dtype=np.int32)
        self.done_version = np.zeros(num_blocks, dtype=np.int32)
        self.num_readers = np.zeros(num_blocks, dtype=np.int16)
        self.read_end = np.zeros(num_blocks, dtype=np.int16)
        self.write_first = np.full(num_blocks, _NO_SLOT, dtype=np.int16)

    def name(self, block: int) -> str:
        return f"{'GPU' if self.pool is Pool.GPU else 'host'} block {block}"


@dataclass(frozen=True, slots=True, eq=False)
class _Reads:
    pool: _BlockPool
    blocks: Ints
    ends: Ints
    bases: NDArray[np.int32]
    versions: NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class _Writes:
    pool: _BlockPool
    blocks: Ints
    firsts: Ints
    before: NDArray[np.int32]
    """The version that each block has before."""
    version: int


class Operation:
    """A step or a batch of copies on one stage, which begins and ends when its lane says so."""

    def __init__(
        self,
        label: str,
        reads: _Reads,
        writes: _Writes,
        name_write: Callable[[int], str],
        readers: Sequence[str] = (),
    ) -> None:
        self._label = label
        self._reads = reads
        self._writes = writes
        self._name_write = name_write
        self._readers = readers

    def begin(self) -> None:
        """Check what is done and what goes on. ``WrongKvError`` names both sides of a conflict."""
        self._check_reads()
        self._check_writes()
        pool, blocks = self._reads.pool, self._reads.blocks
        np.add.at(pool.num_readers, blocks, 1)
        np.maximum.at(pool.read_end, blocks, self._reads.ends.astype(np.int16))
        self._writes.pool.write_first[self._writes.blocks] = self._writes.firsts

    def end(self) -> None:
        """Free what was read, and let what was written be found."""
        pool, blocks = self._reads.pool, self._reads.blocks
        np.subtract.at(pool.num_readers, blocks, 1)
        pool.read_end[blocks[pool.num_readers[blocks] == 0]] = 0
        written, targets = self._writes.pool, self._writes.blocks
        written.write_first[targets] = _NO_SLOT
        written.done_version[targets] = self._writes.version
        written.done_base[targets[self._writes.firsts == 0]] = self._writes.version

    def _check_reads(self) -> None:
        reads, pool = self._reads, self._reads.pool
        blocks = reads.blocks
        overwritten = pool.done_base[blocks] > reads.bases
        missing = pool.done_version[blocks] < reads.versions
        being_written = pool.write_first[blocks] < reads.ends
        wrong = np.flatnonzero(overwritten | missing | being_written)
        if len(wrong) == 0:
            return
        first = int(wrong[0])
        block = int(blocks[first])
        if overwritten[first]:
            why = f"which {self._name_write(int(pool.done_base[block]))} has overwritten"
        elif being_written[first]:
            why = "which is being written"
        else:
            why = f"before {self._name_write(int(reads.versions[first]))} has arrived there"
        self._fail(first, f"reads {pool.name(block)} {why}")

    def _check_writes(self) -> None:
        writes, pool = self._writes, self._writes.pool
        blocks = writes.blocks
        being_read = pool.read_end[blocks] > writes.firsts
        unfinished = (pool.done_version[blocks] < writes.before) | (pool.write_first[blocks] != _NO_SLOT)
        wrong = np.flatnonzero(being_read | unfinished)
        if len(wrong) == 0:
            return
        first = int(wrong[0])
        block = int(blocks[first])
        if being_read[first]:
            why = "which is being read"
        else:
            why = f"before {self._name_write(int(writes.before[first]))} has written it"
        self._fail(None, f"writes {pool.name(block)} {why}")

    def _fail(self, reader: int | None, what: str) -> None:
        who = f" for request {self._readers[reader]}" if reader is not None and self._readers else ""
        raise WrongKvError(f"{self._label}{who} {what}")


class StageKv:
    """One stage's two pools. Operations are made in the order of their submission."""

    def __init__(self, stage: int, *, gpu_blocks: int, host_blocks: int, block_tokens: int) -> None:
        self._stage = stage
        self._block_tokens = block_tokens
        self._pools = {
            Pool.GPU: _BlockPool(Pool.GPU, gpu_blocks),
            Pool.HOST: _BlockPool(Pool.HOST, host_blocks),
        }
        self._labels = ["nothing"]
        self._first_label = 0
        self._step = -1

    def begin_step(self) -> None:
        """Count a step: what is submitted from here on belongs to it."""
        self._step += 1

    def compute(self, step: StepKv) -> Operation:
        """Submit the step's computation. ``WrongKvError`` if blocks hold other KV than its requests', even in order."""
        label = f"step {self._step} on stage {self._stage}"
        pool, blocks = self._pools[Pool.GPU], step.read_blocks
        # Blocks that the step itself begins: each layer's KV is written before that layer's attention reads it.
        is_own = np.isin(blocks, step.written_blocks[step.written_firsts == 0])
        wrong = (pool.identity[blocks] != step.read_identities) | (pool.filled[blocks] < step.read_ends)
        for index in np.flatnonzero(wrong & ~is_own)[:1].tolist():
            block = int(blocks[index])
            raise WrongKvError(
                f"{label} reads {pool.name(block)} as KV of request {step.read_requests[index]}, which it does not "
                f"hold: it was written by {self._name(int(pool.version[block]))} up to slot {pool.filled[block]}"
            )
        reads = self._reads(pool, blocks[~is_own], step.read_ends[~is_own])
        readers = (
            [step.read_requests[index] for index in np.flatnonzero(~is_own)]
            if is_own.any()
            else step.read_requests
        )
        writes = self._write(
            pool, step.written_blocks, step.written_identities, step.written_firsts, step.written_ends, label
        )
        return Operation(label, reads, writes, self._name, readers)

    def copy(self, source: Pool, sources: Ints, targets: Ints) -> Operation:
        """Submit copies of whole blocks to the other pool."""
        from_pool, to_pool = self._pools[source], self._pools[_OTHER[source]]
        label = f"a {_NAMES[source]} of step {self._step} on stage {self._stage}"
        self._require_filled(label, from_pool, sources, np.ones_like(sources))
        filled = from_pool.filled[sources].astype(np.int64)
        reads = self._reads(from_pool, sources, filled)
        firsts = np.zeros_like(targets)
        writes = self._write(to_pool, targets, from_pool.identity[sources], firsts, filled, label)
        return Operation(label, reads, writes, self._name)

    def store_tokens(self, stores: NDArray[np.int32]) -> Operation:
        """Submit copies of slots: rows of (GPU block, host block, first slot, number of slots)."""
        sources, targets, firsts, nums = np.asarray(stores, dtype=np.int64).T
        ends = firsts + nums
        gpu, host = self._pools[Pool.GPU], self._pools[Pool.HOST]
        label = f"a store of tokens of step {self._step} on stage {self._stage}"
        self._require_filled(label, gpu, sources, ends)
        behind = firsts > 0
        self._require_filled(label, host, targets[behind], firsts[behind])
        reads = self._reads(gpu, sources, ends)
        writes = self._write(host, targets, gpu.identity[sources], firsts, ends, label)
        return Operation(label, reads, writes, self._name)

    def _require_filled(self, label: str, pool: _BlockPool, blocks: Ints, ends: Ints) -> None:
        for index in np.flatnonzero(pool.filled[blocks] < ends)[:1].tolist():
            block = int(blocks[index])
            raise WrongKvError(
                f"{label} needs slots [0, {ends[index]}) of {pool.name(block)}, which has {pool.filled[block]}"
            )

    def _reads(self, pool: _BlockPool, blocks: Ints, ends: Ints) -> _Reads:
        return _Reads(pool, blocks, ends, pool.base[blocks], pool.version[blocks])

    def _write(
        self, pool: _BlockPool, blocks: Ints, identities: Ints, firsts: Ints, ends: Ints, label: str
    ) -> _Writes:
        self._labels.append(label)
        version = self._first_label + len(self._labels) - 1
        if len(self._labels) > 2 * _MAX_LABELS:
            del self._labels[:_MAX_LABELS]
            self._first_label += _MAX_LABELS
        before = pool.version[blocks]
        pool.identity[blocks] = identities
        pool.filled[blocks] = ends
        pool.version[blocks] = version
        pool.base[blocks[firsts == 0]] = version
        return _Writes(pool, blocks, firsts, before, version)

    def _name(self, version: int) -> str:
        index = version - self._first_label
        return self._labels[index] if index >= 0 else "an operation long ago"


_OTHER = {Pool.GPU: Pool.HOST, Pool.HOST: Pool.GPU}
_NAMES = {Pool.GPU: "store", Pool.HOST: "prefetch"}
