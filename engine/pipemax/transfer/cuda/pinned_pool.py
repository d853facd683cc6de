"""The host pool of a GPU's stage: pinned, near its GPU, in huge pages where the system grants them.

    # one private anonymous mapping (a shared one gets no huge pages; only this process uses the pool, so forked
    # children do not inherit it), registered in pieces of whole blocks and whole pages, at most 64 GiB each:
    # | block 0 | block 1 | … | block p − 1 | block p | …        | … tail |
    # '------------- piece 0 --------------' '----- piece 1 ----' …

The order matters: bind to the node, ask for huge pages, touch (which allocates the pages), then pin (which takes
about 0.1 s for each GB, and less if the pages are there). Only the scheduler knows who may use which block.
"""

import logging
import math
import mmap
import os
import re
import resource
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from pipemax.domain.errors import EngineStartError, TransferError
from pipemax.domain.units import GIB, MIB, ceil_div
from pipemax.transfer.cuda.device import HostRegistry
from pipemax.transfer.cuda.numa import bind_memory
from pipemax.transfer.host_memory import available_host_bytes
from pipemax.transfer.layout import BlockLayout, ByteRows

log = logging.getLogger(__name__)

MAX_PIECE_BYTES = 64 * GIB
"""Drivers refuse to register much more at once."""
_TOUCH_BYTES = 256 * MIB
_MAX_TOUCH_THREADS = 16
_MAPPING = re.compile(r"([0-9a-f]+)-([0-9a-f]+) ")


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolStartUp:
    """The times that starting the pool took, and what the system granted."""

    num_bytes: int
    touch_s: float
    pin_s: float
    num_pieces: int
    """Pieces registered."""
    numa_node: int | None
    """The node that the pool is bound to; None if it is not bound."""
    huge_bytes: int
    """Bytes of the pool in huge pages."""

    def __str__(self) -> str:
        pinned = f"pinned in {self.pin_s:.1f} s in {self.num_pieces} pieces"
        node = "" if self.numa_node is None else f", on NUMA node {self.numa_node}"
        huge = f"{self.huge_bytes / self.num_bytes:.0%} in huge pages"
        return f"host pool of {self.num_bytes / GIB:.1f} GiB touched in {self.touch_s:.1f} s, {pinned}, {huge}{node}"


class PinnedHostPool:
    """``num_blocks`` rows of bytes, like ``HostPool``; ``close`` it after the last copy."""

    def __init__(
        self,
        layout: BlockLayout,
        num_blocks: int,
        registry: HostRegistry,
        *,
        numa_node: int | None = None,
        max_piece_bytes: int = MAX_PIECE_BYTES,
    ) -> None:
        """Allocate and pin the pool.

        ``ValueError`` without blocks; ``EngineStartError`` if memory does not suffice or cannot be pinned: kernels
        cannot reach other memory, and copies of it would hold up the model.
        """
        if num_blocks < 1:
            raise ValueError(f"the host pool has at least 1 block, not {num_blocks}")
        num_bytes = num_blocks * layout.block_bytes
        require_memory(num_bytes, available_host_bytes())
        self.layout = layout
        self.num_blocks = num_blocks
        self._registry = registry
        self._mapping = mmap.mmap(
            -1,
            ceil_div(num_bytes, mmap.PAGESIZE) * mmap.PAGESIZE,
            flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS,
        )
        self.rows: ByteRows = np.frombuffer(self._mapping, dtype=np.uint8, count=num_bytes).reshape(
            layout.pool_shape(num_blocks)
        )
        self.tensor = torch.from_numpy(self.rows)
        node = numa_node if numa_node is not None and self._bind(numa_node) else None
        self._ask_for_huge_pages()
        # A fork would make the kernel copy the pool, or put pages under it that the GPU does not write to.
        self._mapping.madvise(mmap.MADV_DONTFORK)
        touch_s = _touch(np.frombuffer(self._mapping, dtype=np.uint8))
        self.piece_blocks = blocks_of_a_piece(layout.block_bytes, max_piece_bytes)
        """Blocks registered together: a copy must not cross from one piece to the next."""
        begin_s = time.perf_counter()
        self._registered: list[int] = []
        self._pin()
        self.start_up = PoolStartUp(
            num_bytes=num_bytes,
            touch_s=touch_s,
            pin_s=time.perf_counter() - begin_s,
            num_pieces=len(self._registered),
            numa_node=node,
            huge_bytes=min(num_bytes, huge_page_bytes(self.rows.ctypes.data, len(self._mapping))),
        )
        log.info("%s", self.start_up)

    def close(self) -> None:
        """Unpin the pool, whose copies and kernels must have ended. Safe to call twice."""
        while self._registered:
            self._registry.unregister(self._registered.pop())

    def _bind(self, node: int) -> bool:
        bound = bind_memory(self.rows.ctypes.data, len(self._mapping), node)
        if not bound:
            log.warning("the host pool is not bound to NUMA node %d: libnuma cannot be used here", node)
        return bound

    def _ask_for_huge_pages(self) -> None:
        try:
            self._mapping.madvise(mmap.MADV_HUGEPAGE)
        except OSError as error:
            log.info(
                "the host pool is in ordinary pages: this kernel has no transparent huge ones (%s)", error
            )

    def _pin(self) -> None:
        address, num_bytes = self.rows.ctypes.data, len(self._mapping)
        piece_bytes = self.piece_blocks * self.layout.block_bytes
        for begin in range(0, num_bytes, piece_bytes):
            length = min(piece_bytes, num_bytes - begin)
            try:
                self._registry.register(address + begin, length)
            except TransferError as error:
                self.close()
                raise EngineStartError(
                    f"the host KV pool of {num_bytes / GIB:.1f} GiB cannot be pinned, the limit on locked memory "
                    f"(ulimit -l) is {_locked_memory_limit()}: {error}"
                ) from None  # the one cause that is recorded: CUDA's own words name no remedy
            self._registered.append(address + begin)


def _locked_memory_limit() -> str:
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return "unlimited" if limit == resource.RLIM_INFINITY else f"{limit / GIB:.1f} GiB"


def blocks_of_a_piece(block_bytes: int, max_piece_bytes: int) -> int:
    """Return the most blocks within ``max_piece_bytes`` that make up whole pages; at least the fewest that do."""
    least = math.lcm(block_bytes, mmap.PAGESIZE) // block_bytes
    return max(1, max_piece_bytes // (least * block_bytes)) * least


def require_pools(
    pool_bytes: float, num_pools: int, available_bytes: int, *, other_pinned_bytes: float = 0.0
) -> None:
    """Raise ``EngineStartError`` if all pools of a machine do not fit, before any stage allocates its own.

    ``other_pinned_bytes``: what each worker pins besides its pool.
    """
    if (pool_bytes + other_pinned_bytes) * num_pools > available_bytes:
        most_gib = math.floor(10 * (available_bytes / num_pools - other_pinned_bytes) / GIB) / 10
        besides = (
            f", and {other_pinned_bytes / GIB:.1f} GiB that each worker pins besides,"
            if other_pinned_bytes
            else ""
        )
        remedy = (
            f"set host_kv_gib to {most_gib} or less"
            if most_gib > 0
            else "lower max_num_seqs or max_model_len"
        )
        raise EngineStartError(
            f"{num_pools} host KV pools of {pool_bytes / GIB:.1f} GiB{besides} do not fit into the "
            f"{available_bytes / GIB:.1f} GiB of host memory that are available: {remedy}"
        )


def require_memory(num_bytes: int, available_bytes: int) -> None:
    """Raise ``EngineStartError``, with both numbers, if the pool does not fit."""
    if num_bytes > available_bytes:
        raise EngineStartError(
            f"the host KV pool needs {num_bytes / GIB:.1f} GiB, {available_bytes / GIB:.1f} GiB of host memory are "
            "available: lower host_kv_gib"
        )


def huge_page_bytes(address: int, num_bytes: int, smaps: Path = Path("/proc/self/smaps")) -> int:
    """Return how much of ``[address, address + num_bytes)`` is in huge pages; 0 if the kernel does not say.

    A mapping that reaches beyond the range counts in full, because the kernel merges neighbours.
    """
    try:
        lines = smaps.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return 0
    is_within, huge_bytes = False, 0
    for line in lines:
        if (bounds := _MAPPING.match(line)) is not None:
            begin, end = (int(bound, 16) for bound in bounds.groups())
            is_within = begin < address + num_bytes and address < end
        elif is_within and line.startswith("AnonHugePages:"):
            huge_bytes += int(line.split()[1]) * 1024
    return huge_bytes


def _touch(memory: ByteRows) -> float:
    """Write to each page from many threads: the kernel zeroes pages on the core that asks. Return the seconds."""
    begin_s = time.perf_counter()

    def touch(begin: int) -> None:
        memory[begin : begin + _TOUCH_BYTES : mmap.PAGESIZE] = 0

    threads = min(_MAX_TOUCH_THREADS, os.cpu_count() or 1)
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(touch, range(0, len(memory), _TOUCH_BYTES)))
    return time.perf_counter() - begin_s
