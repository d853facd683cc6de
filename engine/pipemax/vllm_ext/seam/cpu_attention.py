"""Attention on a CPU over blocks that do not follow one another: a block of PipeMax holds all layers' KV.

vLLM's attention declares only the layout in which each layer has a pool of its own. Of latent attention (MLA), the
kernel that reads latent vectors takes the distance of a layer's blocks from the tensor; vLLM's code that writes them
views the blocks as one piece. Here they are written where they belong.
"""

from typing import TYPE_CHECKING, Any

import torch
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.kv_cache_layout import KVCacheLayout

if TYPE_CHECKING:  # seconds to import
    from vllm.v1.attention.backends.mla.cpu_mla import CPUMLAImpl


def declare_block_first() -> None:
    """Have this process's attention take blocks of all layers.

    The kernels take a block's stride from the tensor, so blocks of all layers may alternate; heads within a block come
    before tokens in both layouts, as the kernels require.
    """
    attention: Any = CPUAttentionBackend
    attention.supported_kv_cache_layouts = classmethod(lambda cls: (KVCacheLayout.LBHNC, KVCacheLayout.BLHNC))


def write_latents(
    self: "CPUMLAImpl",
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
    from vllm.v1.attention.backends.mla.cpu_mla import CPUMLAImpl

    latent_attention: Any = CPUMLAImpl
    latent_attention.do_kv_cache_update = write_latents
