"""The KV kernel written plainly in torch: the reference for it on any device. Not for speed."""

import torch

from pipemax.transfer.layout import BlockLayout, layer_views


def offload_tokens(
    gpu_rows: torch.Tensor, host_rows: torch.Tensor, layout: BlockLayout, tokens: torch.Tensor
) -> None:
    """Copy all layers' KV of single tokens into ``host_rows``.

    Both pools are ``(num_blocks, block_bytes)`` bytes; ``tokens`` are integers ``(num_tokens, 3)`` of (GPU block, slot,
    host block).
    """
    gpu_block, slot, host_block = (column.long() for column in tokens.cpu().unbind(1))
    gpu_layers = layer_views(gpu_rows, layout, torch.uint8)
    host_layers = layer_views(host_rows, layout, torch.uint8)
    for gpu, host in zip(gpu_layers, host_layers, strict=True):
        host[host_block, :, slot] = gpu[gpu_block.to(gpu.device), :, slot.to(gpu.device)].to(host.device)


def pack_tokens(
    host_rows: torch.Tensor,
    layout: BlockLayout,
    tokens: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
) -> None:
    """Put tokens into their blocks from keys and values as the QKV projections made them.

    ``keys``, ``values``: ``(layers, num_tokens, kv_heads, head_dim)``, contiguous, in no particular order of tokens;
    ``tokens`` as for ``offload_tokens``.
    """
    for layer, view in enumerate(layer_views(host_rows, layout, keys.dtype)):
        for token, (_, slot, block) in enumerate(tokens.tolist()):
            for head in range(layout.num_kv_heads):
                view[block, head, slot] = torch.cat((keys[layer, token, head], values[layer, token, head]))
