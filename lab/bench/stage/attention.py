"""Attention of one new token per request over paged KV: our Triton kernel, and the torch version that it must equal.

``paged_decode_gqa`` reads pages in place, whatever the strides over blocks, so it serves block-first and layer-first
pools alike. One program takes a request and a KV head with all query heads of its group, so every page is read once.
Compared with vLLM's kernels it does not split along the context, which batches of hundreds do not need.
"""

import torch

try:
    import triton
    import triton.language as tl
except ImportError:  # torch for CPUs comes without Triton
    triton = None

KERNEL_NAME = "paged_decode_gqa (Triton, lab/bench/stage/attention.py)"
_TILE_TOKENS = 64
_MIN_DOT_ROWS = 16

if triton is not None:

    @triton.jit
    def _paged_decode_gqa(
        query,
        kv,
        out,
        tables,
        lengths,
        scale,
        block_stride,
        head_stride,
        table_stride,
        KV_HEADS: tl.constexpr,  # noqa: N803
        GROUP: tl.constexpr,  # noqa: N803
        ROWS: tl.constexpr,  # noqa: N803
        HEAD_DIM: tl.constexpr,  # noqa: N803
        BLOCK_TOKENS: tl.constexpr,  # noqa: N803
        TILE: tl.constexpr,  # noqa: N803
    ):
        request, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
        length = tl.load(lengths + request)
        rows, dims = tl.arange(0, ROWS), tl.arange(0, HEAD_DIM)
        # (requests, kv_heads, group, head_dim); rows past the group pad the matrix product
        at_query = (request * KV_HEADS + head) * GROUP * HEAD_DIM + rows[:, None] * HEAD_DIM + dims[None, :]
        in_group = rows[:, None] < GROUP
        q = tl.load(query + at_query, mask=in_group, other=0.0)
        peak = tl.full((ROWS,), float("-inf"), tl.float32)
        total = tl.zeros((ROWS,), tl.float32)
        sums = tl.zeros((ROWS, HEAD_DIM), tl.float32)
        for first in range(0, length, TILE):
            tokens = first + tl.arange(0, TILE)
            valid = tokens < length
            block = tl.load(tables + request * table_stride + tokens // BLOCK_TOKENS, mask=valid, other=0)
            at = (
                block.to(tl.int64) * block_stride
                + head * head_stride
                + (tokens % BLOCK_TOKENS) * (2 * HEAD_DIM)
            )
            keys = tl.load(kv + at[:, None] + dims[None, :], mask=valid[:, None], other=0.0)
            scores = tl.dot(q, tl.trans(keys)).to(tl.float32) * scale
            scores = tl.where(valid[None, :], scores, float("-inf"))
            higher = tl.maximum(peak, tl.max(scores, 1))
            shares = tl.exp(scores - higher[:, None])
            decay = tl.exp(peak - higher)
            values = tl.load(kv + at[:, None] + HEAD_DIM + dims[None, :], mask=valid[:, None], other=0.0)
            total = total * decay + tl.sum(shares, 1)
            sums = sums * decay[:, None] + tl.dot(shares.to(values.dtype), values)
            peak = higher
        result = sums / total[:, None]
        tl.store(out + at_query, result.to(out.dtype.element_ty), mask=in_group)


def paged_decode_gqa(
    query: torch.Tensor, kv: torch.Tensor, tables: torch.Tensor, lengths: torch.Tensor
) -> torch.Tensor:
    """Attend from one new token of each request to its paged KV, by the Triton kernel.

    ``query``: ``(requests, heads, head_dim)``, contiguous; ``kv``: one layer of a pool, ``(num_blocks, kv_heads,
    block_tokens, 2 · head_dim)``, keys then values; ``tables``: int32 ``(requests, most blocks)``; ``lengths``: int32
    ``(requests,)``, each at least 1. The result has the shape of ``query``.
    """
    requests, heads, head_dim = query.shape
    _, kv_heads, block_tokens, _ = kv.shape
    group = heads // kv_heads
    out = torch.empty_like(query)
    _paged_decode_gqa[(requests, kv_heads)](
        query,
        kv,
        out,
        tables,
        lengths,
        head_dim**-0.5,
        kv.stride(0),
        kv.stride(1),
        tables.stride(0),
        KV_HEADS=kv_heads,
        GROUP=group,
        ROWS=max(_MIN_DOT_ROWS, triton.next_power_of_2(group)),
        HEAD_DIM=head_dim,
        BLOCK_TOKENS=block_tokens,
        TILE=_TILE_TOKENS,
    )
    return out


def gathered_decode(
    query: torch.Tensor, kv: torch.Tensor, tables: torch.Tensor, lengths: torch.Tensor
) -> torch.Tensor:
    """Compute ``paged_decode_gqa`` by gathering each request's pages; for CPUs and as the reference."""
    heads, kv_heads = query.shape[1], kv.shape[1]
    outputs = []
    for q, table, length in zip(query, tables, lengths.tolist(), strict=True):
        keys, values = gather(kv, table, length)
        attended = torch.nn.functional.scaled_dot_product_attention(
            q.view(heads, 1, -1), keys, values, enable_gqa=heads != kv_heads
        )
        outputs.append(attended.view(heads, -1))
    return torch.stack(outputs)


def gather(kv: torch.Tensor, table: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return one request's keys and values, ``(kv_heads, length, head_dim)`` each."""
    block_tokens = kv.shape[2]
    pages = kv[table[: -(-length // block_tokens)].long()]  # (blocks, kv_heads, block_tokens, 2 · head_dim)
    tokens = pages.transpose(0, 1).flatten(1, 2)[:, :length]
    keys, values = tokens.chunk(2, dim=-1)
    return keys, values
