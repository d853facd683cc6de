"""Latent attention (MLA) on a CPU, over blocks that do not follow one another.

A block of PipeMax holds all layers' KV, so a layer's parts of two blocks lie apart. vLLM's kernel that reads latent
vectors takes the distance from the tensor; its code that writes them views a layer's blocks as one piece. This writes
them where they belong.
"""

from typing import Any

import torch
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLAImpl


def write_latents(
    self: CPUMLAImpl,
    kv_c_normed: torch.Tensor,
    k_pe: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_cache_dtype: str,
    k_scale: torch.Tensor,
    skip_scale: bool = False,
) -> None:
    """Write new tokens' latent vectors and positions into a layer's blocks, as ``CPUMLAImpl.do_kv_cache_update``.

    ``kv_cache``: ``(num_blocks, block_tokens, content)``, with any distance between blocks.
    """
    if kv_cache.numel() == 0:
        return
    slots = slot_mapping.flatten().long()
    is_slot = slots >= 0  # vLLM pads with -1
    latents = torch.cat((kv_c_normed, k_pe.squeeze(1)), dim=-1)[is_slot].to(kv_cache.dtype)
    block_tokens = kv_cache.shape[1]
    kv_cache[slots[is_slot] // block_tokens, slots[is_slot] % block_tokens] = latents


def write_between_blocks() -> None:
    """Have this process write latent vectors so."""
    latent_attention: Any = CPUMLAImpl
    latent_attention.do_kv_cache_update = write_latents
