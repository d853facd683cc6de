"""Measures how much of a step's prefetch and offload hides behind its computation, through the real transfers."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from lab.bench.stage.clock import timed
from lab.bench.stage.model import LlamaStage
from lab.bench.stage.pools import PoolPlan
from lab.bench.stage.random_batch import random_batch
from lab.bench.stage.transfers import copies_for
from pipemax.domain.units import GpuBlockId, HostBlockId
from pipemax.transfer.backend import StepTransfers
from pipemax.transfer.commands import BlockPrefetch, StepCopies, TokenStore


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlapRow:
    """One batch size."""

    batch: int
    context_tokens: int
    compute_ms: float
    load_ms: float
    store_ms: float
    together_ms: float
    loaded_blocks: int
    hidden: float
    """Share of prefetch and store time that does not lengthen the step."""


def measure_overlap(
    stage: LlamaStage,
    plan: PoolPlan,
    kv: list[torch.Tensor],
    transfers: StepTransfers,
    *,
    batch: int,
    context_tokens: int,
    load_share: float,
    repeats: int,
    rng: np.random.Generator,
) -> OverlapRow:
    """Measure a decode step with copies and without.

    Prefetches fill ``load_share`` of the time that the step computes, and each request's new token is stored. The
    prefetches go to blocks of no running request, as a plan's do.
    """
    decode = random_batch(plan, batch, context_tokens, stage.device, rng)
    hidden = stage.hidden(batch)

    def compute() -> None:
        stage.decode(hidden, kv, decode)

    def step_s(copies: StepCopies, work: Callable[[], None]) -> float:
        """Time a step with everything that it copies: the next step, an empty one, waits for all of it."""

        def whole() -> None:
            transfers.begin_step(copies)
            transfers.start_prefetches(copies)
            work()
            transfers.end_step(copies)
            transfers.begin_step(StepCopies())
            transfers.end_step(StepCopies())

        return timed(stage.device, whole, repeats=repeats).median_s

    def nothing() -> None:
        pass

    stores = _token_stores(decode.places.blocks.tolist(), decode.places.slots.tolist())
    stored = copies_for(plan, StepCopies(token_stores=stores), stores_tokens=stage.device.type == "cuda")
    running = set(decode.tables.flatten().tolist())
    compute_s = step_s(StepCopies(), compute)
    probe = min(64, plan.gpu_blocks - len(running), plan.host_blocks)
    if probe < 1:
        raise ValueError(f"{batch} requests of {context_tokens} tokens leave no GPU block to prefetch into")
    block_s = step_s(_prefetches(plan, probe, running, rng), nothing) / probe
    num_blocks = max(
        1, min(int(load_share * compute_s / block_s), plan.gpu_blocks - len(running), plan.host_blocks)
    )
    loaded = _prefetches(plan, num_blocks, running, rng)
    load_s = step_s(loaded, nothing)
    store_s = step_s(stored, nothing)
    both = StepCopies(prefetches=loaded.prefetches, stores=stored.stores, token_stores=stored.token_stores)
    together_s = step_s(both, compute)
    return OverlapRow(
        batch=batch,
        context_tokens=context_tokens,
        compute_ms=compute_s * 1e3,
        load_ms=load_s * 1e3,
        store_ms=store_s * 1e3,
        together_ms=together_s * 1e3,
        loaded_blocks=num_blocks,
        hidden=1 - min(1.0, max(0.0, together_s - compute_s) / (load_s + store_s)),
    )


def _token_stores(blocks: list[int], slots: list[int]) -> tuple[TokenStore, ...]:
    return tuple(
        TokenStore(GpuBlockId(block), HostBlockId(row), first_slot=slot, num_slots=1)
        for row, (block, slot) in enumerate(zip(blocks, slots, strict=True))
    )


def _prefetches(plan: PoolPlan, num_blocks: int, running: set[int], rng: np.random.Generator) -> StepCopies:
    targets = [block for block in rng.permutation(plan.gpu_blocks).tolist() if block not in running]
    sources = rng.permutation(plan.host_blocks)[:num_blocks].tolist()
    pairs = zip(sources, targets[:num_blocks], strict=True)
    return StepCopies(
        prefetches=plan.prefetches(BlockPrefetch(HostBlockId(s), GpuBlockId(t)) for s, t in pairs)
    )
