"""Makes the batch of a decode step whose requests have one length."""

import numpy as np
import torch

from lab.bench.stage.model import DecodeBatch, TokenPlaces
from lab.bench.stage.pools import PoolPlan


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
