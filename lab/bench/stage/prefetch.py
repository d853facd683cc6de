"""Measures host → GPU: the peak of one large pinned copy, and scattered blocks by layout, block size and copy call."""

from dataclasses import dataclass
from enum import StrEnum
from statistics import median
from typing import Protocol

import numpy as np
import torch

from lab.bench.stage.clock import timed
from lab.bench.stage.pools import PoolPlan


class Call(StrEnum):
    """How scattered pieces are submitted."""

    SINGLE = "cudaMemcpyAsync"
    BATCH = "cudaMemcpyBatchAsync"
    CPU = "memcpy"
    """The CPU backend's copy, for trying out the bench."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakRow:
    """One large copy."""

    direction: str
    mib: float
    gb_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefetchRow:
    """Scattered blocks, no two of them adjacent."""

    layout: str
    block_tokens: int
    call: str
    piece_kib: float
    pieces: int
    gb_per_s: float
    of_peak: float
    submit_ms: float
    """Time of the submitting thread within the copy calls."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """How long one batch of pieces took."""

    device_s: float
    submit_s: float
    """Seconds of the submitting thread within the call."""


class Mover(Protocol):
    """Copies parts of a host pool to parts of a GPU pool."""

    calls: tuple[Call, ...]

    def prefetch(self, pairs: list[tuple[int, int]], call: Call) -> Moved:
        """Move (host part, GPU part) pairs, with nothing else running."""


def measure_peak(device: torch.device, num_bytes: int, repeats: int) -> list[PeakRow]:
    """Measure one large copy in both directions, one at a time."""
    is_cuda = device.type == "cuda"
    host = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=is_cuda)
    gpu = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    rows = []
    for direction, source, target in (("host → GPU", host, gpu), ("GPU → host", gpu, host)):
        times = timed(device, lambda s=source, t=target: t.copy_(s, non_blocking=True), repeats=repeats)
        rows.append(
            PeakRow(direction=direction, mib=num_bytes / 2**20, gb_per_s=num_bytes / times.median_s / 1e9)
        )
    return rows


def measure_prefetch(
    plan: PoolPlan,
    mover: Mover,
    *,
    num_blocks: int,
    peak_gb_per_s: float,
    repeats: int,
    rng: np.random.Generator,
) -> list[PrefetchRow]:
    """Measure ``num_blocks`` blocks at random places of both pools, by each call; return medians."""
    rows = []
    for call in mover.calls:
        moved = [mover.prefetch(scattered_parts(plan, num_blocks, rng), call) for _ in range(repeats + 1)][1:]
        rate = num_blocks * plan.block.block_bytes / median(m.device_s for m in moved) / 1e9
        rows.append(
            PrefetchRow(
                layout=str(plan.layout),
                block_tokens=plan.block.block_tokens,
                call=str(call),
                piece_kib=plan.part.block_bytes / 1024,
                pieces=num_blocks * plan.parts_per_block,
                gb_per_s=rate,
                of_peak=rate / peak_gb_per_s,
                submit_ms=median(m.submit_s for m in moved) * 1e3,
            )
        )
    return rows


def scattered_parts(plan: PoolPlan, num_blocks: int, rng: np.random.Generator) -> list[tuple[int, int]]:
    """Return (host part, GPU part) of random blocks, every other one, so that no two can be joined.

    Raise ``ValueError`` if the pools have fewer than ``2 * num_blocks`` blocks.
    """
    if 2 * num_blocks > min(plan.host_blocks, plan.gpu_blocks):
        raise ValueError(
            f"{num_blocks} scattered blocks need pools of {2 * num_blocks}, there are {plan.host_blocks} and "
            f"{plan.gpu_blocks}"
        )
    sources = 2 * rng.permutation(plan.host_blocks // 2)[:num_blocks]
    targets = 2 * rng.permutation(plan.gpu_blocks // 2)[:num_blocks]
    return [
        (layer * plan.host_blocks + source, layer * plan.gpu_blocks + target)
        for source, target in zip(sources.tolist(), targets.tolist(), strict=True)
        for layer in range(plan.parts_per_block)
    ]
