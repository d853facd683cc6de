"""Send known bytes through every lane of a stage's copies and compare them, byte for byte, on the machine at hand.

Each check overwrites what it is going to compare before the copy, so nothing passes that was there already. The last
one damages a byte on purpose and must be told of exactly that block. Then the same copies are timed, next to torch's
plain copy of as many bytes between the same two pools, which is the best that the link gives to one copy.

It needs only torch. The stage must be idle, because the check overwrites both pools. At the end it sets what it wrote
to zero: kernels may multiply memory that no token has filled by zero, which leaves NaN as it is.
"""

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from pipemax.domain.errors import TransferError
from pipemax.domain.units import GpuBlockId, HostBlockId
from pipemax.transfer.backend import StepTransfers
from pipemax.transfer.checks.poisoned_prefetches import NAN_BYTE
from pipemax.transfer.commands import BlockPrefetch, BlockStore, StepCopies, TokenStore
from pipemax.transfer.layout import BlockLayout, layer_views

_MAX_BYTES = 64 * 2**20
"""Of one pattern: enough to time a link of 50 GB/s, and drawn from all over both pools."""
_REPEATS = 4
"""Of each check, with other bytes, for copies that go wrong now and then."""
_ROUNDS = 8
"""Of steps in flight together."""
_TIMED_RUNS = 3


@dataclass(slots=True, kw_only=True)
class CopyCheck:
    """What became of the bytes on one stage."""

    num_blocks: int
    """Blocks of each pattern."""
    block_bytes: int
    passed: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    bytes_per_s: dict[str, float] = field(default_factory=dict)
    """Best of three, by kind of copy."""

    def to_values(self) -> dict[str, Any]:
        """Return plain values, which cross processes."""
        return {name: getattr(self, name) for name in self.__slots__}


def check_copies(
    transfers: StepTransfers,
    layout: BlockLayout,
    gpu_rows: torch.Tensor,
    host_rows: torch.Tensor,
    *,
    stores_tokens: bool,
) -> CopyCheck:
    """Check the copies of an idle stage; faults are in the result, and nothing is raised for them.

    ``gpu_rows``, ``host_rows``: ``(num_blocks, block_bytes)`` bytes, the pools of ``transfers``; what they hold is
    lost. ``stores_tokens``: the device also stores single tokens of a block. ``ValueError`` if a pool has too few
    blocks for any copy.
    """
    return _Checker(transfers, layout, gpu_rows, host_rows).run(stores_tokens=stores_tokens)


class _Checker:
    def __init__(
        self,
        transfers: StepTransfers,
        layout: BlockLayout,
        gpu_rows: torch.Tensor,
        host_rows: torch.Tensor,
    ) -> None:
        self._transfers = transfers
        self._layout = layout
        self._gpu = gpu_rows
        self._host = host_rows
        # Without block 0, vLLM's null block; prefetches go to other blocks than the stores came from.
        num_blocks = min((len(gpu_rows) - 1) // 2, len(host_rows), max(1, _MAX_BYTES // layout.block_bytes))
        if num_blocks < 1:
            raise ValueError(
                f"pools of {len(gpu_rows)} and {len(host_rows)} blocks are too small to check copies"
            )
        self._random = random.Random(0)
        self._bytes = torch.Generator().manual_seed(0)
        gpu_ids = self._random.sample(range(1, len(gpu_rows)), 2 * num_blocks)
        self._sources = [GpuBlockId(block) for block in gpu_ids[:num_blocks]]
        self._targets = [GpuBlockId(block) for block in gpu_ids[num_blocks:]]
        self._replicas = [
            HostBlockId(block) for block in self._random.sample(range(len(host_rows)), num_blocks)
        ]
        self._result = CopyCheck(num_blocks=num_blocks, block_bytes=layout.block_bytes)

    def run(self, *, stores_tokens: bool) -> CopyCheck:
        checks: dict[str, Callable[[], str]] = {
            "stores": self._check_stores,
            "saves": self._check_saves,
            "prefetches": self._check_prefetches,
            "later prefetches": self._check_later_prefetches,
            "steps in flight together": self._check_steps_in_flight,
        }
        if stores_tokens:
            checks["stores of single tokens"] = self._check_token_stores
        checks["a damaged copy"] = self._check_damage  # last: it leaves one behind
        try:
            for name, check in checks.items():
                faults = [fault for _ in range(_REPEATS) if (fault := check())]
                if faults:
                    self._result.faults.append(f"{name}: {faults[0]}")
                else:
                    self._result.passed.append(name)
            self._time_copies()
            self._clear()
            self._wait()
            # Takes the times of all that was waited for: they are no step's.
            self._begin_and_end(StepCopies())
        except TransferError as error:
            self._result.faults.append(str(error))
        return self._result

    # -- the checks; each returns a fault in words, or "" ----------------------------------------------------------

    def _check_stores(self) -> str:
        pattern = self._begin_with_pattern()
        self._step(StepCopies(stores=self._stores()))
        return self._difference(pattern, self._host_blocks())

    def _check_saves(self) -> str:
        pattern = self._begin_with_pattern()

        def overwrite() -> None:
            self._gpu[self._index(self._sources)] = NAN_BYTE

        self._step(StepCopies(saves=self._stores()), overwrite)
        return self._difference(pattern, self._host_blocks())

    def _check_prefetches(self) -> str:
        pattern = self._pattern()
        self._host[torch.tensor(self._replicas)] = pattern
        self._gpu[self._index(self._targets)] = NAN_BYTE
        self._step(StepCopies(prefetches=self._prefetches()))
        return self._difference(pattern, self._gpu_blocks(self._targets))

    def _check_later_prefetches(self) -> str:
        pattern = self._pattern()
        self._host[torch.tensor(self._replicas)] = pattern
        self._gpu[self._index(self._targets)] = NAN_BYTE
        half = len(self._targets) // 2
        prefetches = self._prefetches()
        self._step(StepCopies(prefetches=prefetches[:half], later_prefetches=prefetches[half:]))
        self._step()
        return self._difference(pattern, self._gpu_blocks(self._targets))

    def _check_token_stores(self) -> str:
        pattern = self._begin_with_pattern()
        expected = torch.full_like(pattern, NAN_BYTE)
        to_views = layer_views(expected, self._layout, torch.uint8)
        from_views = layer_views(pattern, self._layout, torch.uint8)
        stores: list[TokenStore] = []
        for place, (source, target) in enumerate(zip(self._sources, self._replicas, strict=True)):
            first = self._random.randrange(self._layout.block_tokens)
            num_slots = self._random.randint(1, self._layout.block_tokens - first)
            stores.append(TokenStore(source, target, first, num_slots))
            for to_layer, from_layer in zip(to_views, from_views, strict=True):
                to_layer[place, :, first : first + num_slots] = from_layer[
                    place, :, first : first + num_slots
                ]
        self._step(StepCopies(token_stores=tuple(stores)))
        return self._difference(expected, self._host_blocks())

    def _check_steps_in_flight(self) -> str:
        """Write, store, overwrite, prefetch and read, round after round, without waiting for any of it."""
        size = max(1, len(self._sources) // 4)
        stores, prefetches = self._stores()[:size], self._prefetches()[:size]
        sources, targets = self._index(self._sources[:size]), self._index(self._targets[:size])
        shape = (_ROUNDS, size, self._layout.block_bytes)
        patterns = torch.randint(256, shape, dtype=torch.uint8, generator=self._bytes)
        on_device = patterns.to(self._gpu.device)
        read = torch.empty_like(on_device)

        def write(number: int) -> None:
            self._gpu[sources] = on_device[number]

        def overwrite() -> None:
            self._gpu[sources] = NAN_BYTE

        def take(number: int) -> None:
            read[number] = self._gpu[targets]

        for number in range(_ROUNDS):
            self._begin_and_end(StepCopies(stores=stores, store_fence=None), partial(write, number))
            self._begin_and_end(StepCopies(prefetches=prefetches, store_fence=1, prefetch_fence=1), overwrite)
            self._begin_and_end(StepCopies(store_fence=None), partial(take, number))
        self._wait()
        return self._difference(patterns.flatten(0, 1), read.cpu().flatten(0, 1))

    def _check_damage(self) -> str:
        pattern = self._begin_with_pattern()
        self._step(StepCopies(stores=self._stores()))
        self._host[self._replicas[0], 0] ^= 0xFF
        self._step(StepCopies(prefetches=self._prefetches()))
        num_wrong = int((self._gpu_blocks(self._targets) != pattern).any(1).sum())
        return "" if num_wrong == 1 else f"1 block was damaged on purpose and {num_wrong} were found"

    # -- speed -----------------------------------------------------------------------------------------------------

    def _time_copies(self) -> None:
        num_blocks = len(self._sources)
        gpu_row = [GpuBlockId(block) for block in range(1, 1 + num_blocks)]
        host_row = [HostBlockId(block) for block in range(num_blocks)]
        adjacent = tuple(map(BlockPrefetch, host_row, gpu_row))
        adjacent_stores = tuple(map(BlockStore, gpu_row, host_row))
        gpu, host = self._gpu[1 : 1 + num_blocks], self._host[:num_blocks]
        copies: dict[str, Callable[[], object]] = {
            "host to GPU, plain copy": lambda: gpu.copy_(host, non_blocking=True),
            "GPU to host, plain copy": lambda: host.copy_(gpu, non_blocking=True),
            "prefetch, adjacent blocks": lambda: self._begin_and_end(StepCopies(prefetches=adjacent)),
            "prefetch, scattered blocks": lambda: self._begin_and_end(
                StepCopies(prefetches=self._prefetches())
            ),
            "store, adjacent blocks": lambda: self._begin_and_end(StepCopies(stores=adjacent_stores)),
            "store, scattered blocks": lambda: self._begin_and_end(StepCopies(stores=self._stores())),
        }
        for name, copy in copies.items():
            seconds = min(self._seconds(copy) for _ in range(_TIMED_RUNS))
            self._result.bytes_per_s[name] = num_blocks * self._layout.block_bytes / max(seconds, 1e-9)

    def _clear(self) -> None:
        num_blocks = len(self._sources)
        self._gpu[self._index([*self._sources, *self._targets])] = 0
        self._gpu[1 : 1 + num_blocks] = 0
        self._host[torch.tensor(self._replicas)] = 0
        self._host[:num_blocks] = 0

    def _seconds(self, copy: Callable[[], object]) -> float:
        self._wait()
        begin_s = time.perf_counter()
        copy()
        self._wait()
        return time.perf_counter() - begin_s

    # -- what they share -------------------------------------------------------------------------------------------

    def _begin_with_pattern(self) -> torch.Tensor:
        """Put a new pattern into the source blocks and poison into their replicas; return the pattern."""
        pattern = self._pattern()
        self._gpu[self._index(self._sources)] = pattern.to(self._gpu.device)
        self._host[torch.tensor(self._replicas)] = NAN_BYTE
        return pattern

    def _pattern(self) -> torch.Tensor:
        shape = (len(self._sources), self._layout.block_bytes)
        return torch.randint(256, shape, dtype=torch.uint8, generator=self._bytes)

    def _stores(self) -> tuple[BlockStore, ...]:
        return tuple(map(BlockStore, self._sources, self._replicas))

    def _prefetches(self) -> tuple[BlockPrefetch, ...]:
        return tuple(map(BlockPrefetch, self._replicas, self._targets))

    def _step(self, copies: StepCopies | None = None, compute: Callable[[], None] | None = None) -> None:
        self._begin_and_end(copies or StepCopies(), compute)
        self._wait()

    def _begin_and_end(self, copies: StepCopies, compute: Callable[[], None] | None = None) -> None:
        self._transfers.begin_step(copies)
        self._transfers.start_prefetches(copies)
        if compute is not None:
            compute()
        self._transfers.end_step(copies)

    def _wait(self) -> None:
        """Wait until nothing is under way: on a CPU the next step does, on a GPU the device is asked."""
        self._begin_and_end(StepCopies(abandons_prefetches=True))
        if self._gpu.is_cuda:
            torch.cuda.synchronize(self._gpu.device)

    def _index(self, blocks: Sequence[int]) -> torch.Tensor:
        return torch.tensor(blocks, device=self._gpu.device)

    def _host_blocks(self) -> torch.Tensor:
        return self._host[torch.tensor(self._replicas)]

    def _gpu_blocks(self, blocks: Sequence[int]) -> torch.Tensor:
        return self._gpu[self._index(blocks)].cpu()

    def _difference(self, expected: torch.Tensor, got: torch.Tensor) -> str:
        num_wrong = int((expected != got).any(1).sum())
        return f"{num_wrong} of {len(expected)} blocks differ" if num_wrong else ""
