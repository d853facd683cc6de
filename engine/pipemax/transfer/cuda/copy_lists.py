"""Check spans of pools and turn them into addresses for CUDA's copy calls. Pure, and tested without a GPU.

# the host pool is registered in pieces; CUDA does not know that they are neighbours:
# | piece 0 | piece 1 | …        a copy across a border becomes two
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from pipemax.transfer.cuda.copy_runs import CopyRuns, Int64s
from pipemax.transfer.cuda.device import Copy, Pool, Span


class CopyList(NamedTuple):
    """Three lists of equal length, one entry per copy."""

    targets: list[int]
    """Addresses, like ``sources``."""
    sources: list[int]
    sizes: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolMap:
    """The addresses and sizes of the pools."""

    addresses: Mapping[Pool, int]
    num_bytes: Mapping[Pool, int]
    host_piece_bytes: int | None = None
    """Size of the pieces that are registered; None is the whole pool."""

    def resolve(self, copies: Iterable[Copy]) -> CopyList:
        """Turn copies into addresses. ``ValueError`` if a span leaves its pool or a copy's spans differ in length."""
        if isinstance(copies, CopyRuns) and self._is_plain(copies):
            return CopyList(
                (copies.target_bytes + self.addresses[copies.target]).tolist(),
                (copies.source_bytes + self.addresses[copies.source]).tolist(),
                copies.sizes.tolist(),
            )
        targets: list[int] = []
        sources: list[int] = []
        sizes: list[int] = []
        for copy in copies:
            self._check(copy)
            for offset, size in self._parts(copy):
                targets.append(self.addresses[copy.target.pool] + copy.target.first_byte + offset)
                sources.append(self.addresses[copy.source.pool] + copy.source.first_byte + offset)
                sizes.append(size)
        return CopyList(targets, sources, sizes)

    def _is_plain(self, runs: CopyRuns) -> bool:
        """Tell whether all lie within their pools, and none crosses a border of the host pool's pieces."""
        for pool, firsts in ((runs.source, runs.source_bytes), (runs.target, runs.target_bytes)):
            ends = firsts + runs.sizes
            if (firsts < 0).any() or (runs.sizes < 1).any() or (ends > self.num_bytes[pool]).any():
                return False
            if pool is Pool.HOST and (self._piece_of(firsts) != self._piece_of(ends - 1)).any():
                return False
        return True

    def _piece_of(self, host_bytes: Int64s) -> Int64s:
        return host_bytes // (self.host_piece_bytes or self.num_bytes[Pool.HOST])

    def _check(self, copy: Copy) -> None:
        if copy.source.num_bytes != copy.target.num_bytes:
            raise ValueError(f"a copy's two spans differ in length: {copy.source} and {copy.target}")
        for span in copy:
            limit = self.num_bytes[span.pool]
            if not 0 <= span.first_byte < span.first_byte + span.num_bytes <= limit:
                raise ValueError(f"{span} leaves its pool of {limit:,} bytes")

    def _parts(self, copy: Copy) -> Iterator[tuple[int, int]]:
        """Yield (offset, size) of each part that lies within one piece of the host pool."""
        host: Span | None = next((span for span in copy if span.pool is Pool.HOST), None)
        num_bytes = copy.source.num_bytes
        if host is None or self.host_piece_bytes is None:
            yield 0, num_bytes
            return
        offset = 0
        while offset < num_bytes:
            room = self.host_piece_bytes - (host.first_byte + offset) % self.host_piece_bytes
            size = min(room, num_bytes - offset)
            yield offset, size
            offset += size
