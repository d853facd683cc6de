"""Measures what the controller must know of the stage before it can plan: its decode times and host → GPU rate."""

from statistics import median

import numpy as np
import torch

from bench.stage.clock import synchronize, timed
from bench.stage.model import DecodeBatch, LlamaStage, TokenPlaces
from bench.stage.pools import PoolPlan
from pipemax.control.times.estimator import ProfileRow
from pipemax.domain.units import GpuBlockId, HostBlockId
from pipemax.transfer.backend import StepTransfers
from pipemax.transfer.commands import BlockPrefetch, StepCopies


def random_batch(
    plan: PoolPlan, batch: int, context_tokens: int, device: torch.device, rng: np.random.Generator
) -> DecodeBatch:
    """Return a batch of requests of one length, on blocks of their own scattered over the pool.

    Raise ``ValueError`` if they do not fit.
    """
    block_tokens = plan.block.block_tokens
    num_blocks = -(-context_tokens // block_tokens)
    if batch * num_blocks > plan.gpu_blocks:
        raise ValueError(
            f"{batch} requests of {context_tokens} tokens need {batch * num_blocks} GPU blocks, there are "
            f"{plan.gpu_blocks}"
        )
    blocks = rng.permutation(plan.gpu_blocks)[: batch * num_blocks].astype(np.int32)
    tables = torch.from_numpy(blocks.reshape(batch, num_blocks)).to(device)
    last = context_tokens - 1
    return DecodeBatch(
        places=TokenPlaces(
            blocks=tables[:, last // block_tokens].long(),
            slots=torch.full((batch,), last % block_tokens, dtype=torch.int64, device=device),
        ),
        tables=tables,
        lengths=torch.full((batch,), context_tokens, dtype=torch.int32, device=device),
    )


def profile_decode(
    stage: LlamaStage,
    plan: PoolPlan,
    kv: list[torch.Tensor],
    *,
    batches: tuple[int, ...],
    contexts: tuple[int, ...],
    repeats: int,
    rng: np.random.Generator,
) -> list[ProfileRow]:
    """Measure the median time of each batch size and context that fits into the pool."""
    rows = []
    for batch in batches:
        for context in contexts:
            if batch * -(-context // plan.block.block_tokens) > plan.gpu_blocks:
                continue
            decode = random_batch(plan, batch, context, stage.device, rng)
            hidden = stage.hidden(batch)
            times = timed(stage.device, lambda h=hidden, d=decode: stage.decode(h, kv, d), repeats=repeats)
            rows.append(ProfileRow(size=batch, kv_tokens=batch * context, seconds=times.median_s))
    return rows


def measure_h2d(
    stage: LlamaStage,
    plan: PoolPlan,
    kv: list[torch.Tensor],
    transfers: StepTransfers,
    *,
    batch: DecodeBatch,
    num_blocks: int,
    repeats: int,
    rng: np.random.Generator,
) -> float:
    """Return the median bytes per second of scattered prefetches during decode steps, through the real transfers."""
    hidden = stage.hidden(len(batch.lengths))
    seconds: list[float] = []
    for _ in range(repeats):
        sources = rng.permutation(plan.host_blocks)[:num_blocks]
        targets = rng.permutation(plan.gpu_blocks)[:num_blocks]
        pairs = zip(sources.tolist(), targets.tolist(), strict=True)
        prefetches = plan.prefetches(BlockPrefetch(HostBlockId(s), GpuBlockId(t)) for s, t in pairs)
        copies = StepCopies(prefetches=prefetches)
        seconds += [prefetch.seconds for prefetch in transfers.begin_step(copies).prefetches]
        transfers.start_prefetches(copies)
        stage.decode(hidden, kv, batch)
        transfers.end_step(StepCopies())
    while len(seconds) < repeats:  # times come once the device is past them
        seconds += [prefetch.seconds for prefetch in transfers.begin_step(StepCopies()).prefetches]
        transfers.end_step(StepCopies())
        synchronize(stage.device)
    return num_blocks * plan.block.block_bytes / median(seconds)
