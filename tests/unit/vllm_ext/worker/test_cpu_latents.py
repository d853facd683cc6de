"""Latent vectors (MLA) on a CPU, in blocks that hold all layers: written and read as in vLLM's own blocks."""

import torch
from vllm import _custom_ops as ops
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLAImpl

from pipemax.vllm_ext.seam.cpu_attention import write_latents

BLOCKS, LAYERS, BLOCK_TOKENS, LATENT, ROPE = 6, 3, 16, 512, 64
SCALE = torch.ones(1)

vllms_write = CPUMLAImpl.do_kv_cache_update


def test_latents_are_written_where_vllm_s_own_blocks_have_them_and_nowhere_else() -> None:
    impl = object.__new__(CPUMLAImpl)
    pool = torch.zeros(BLOCKS, LAYERS, BLOCK_TOKENS, LATENT + ROPE)
    own = torch.zeros(BLOCKS, BLOCK_TOKENS, LATENT + ROPE)
    slots = torch.tensor([17, 18, -1, 80, 3])  # vLLM pads with -1
    latents, positions = torch.randn(5, LATENT), torch.randn(5, 1, ROPE)
    vllms_write(impl, latents, positions, own, slots, "auto", SCALE)
    write_latents(impl, latents, positions, pool[:, 1], slots, "auto", SCALE)
    assert torch.equal(pool[:, 1], own)
    assert int(own.any(dim=-1).sum()) == 4
    assert not pool[:, [0, 2]].any()


def test_an_engine_that_is_being_profiled_has_no_blocks_to_write_to() -> None:
    impl = object.__new__(CPUMLAImpl)
    empty = torch.tensor([])
    write_latents(
        impl, torch.randn(1, LATENT), torch.randn(1, 1, ROPE), empty, torch.tensor([0]), "auto", SCALE
    )


def test_vllm_s_kernel_reads_blocks_of_all_layers_as_it_reads_its_own() -> None:
    pool = torch.randn(BLOCKS, LAYERS, BLOCK_TOKENS, LATENT + ROPE)
    tables = torch.tensor([[4, 1, 3], [5, 0, 0]], dtype=torch.int32)
    lengths = torch.tensor([40, 9], dtype=torch.int32)
    queries = torch.randn(2, 8, LATENT + ROPE)
    outputs = []
    for cache in (pool[:, 1], pool[:, 1].contiguous()):
        output = torch.zeros(2, 8, LATENT)
        ops.mla_decode_kvcache_cpu(output, queries, cache, 0.05, tables, lengths)
        outputs.append(output)
    assert torch.equal(*outputs)
    context = torch.cat([*pool[[4, 1, 3], 1]])[:40]
    weights = torch.softmax(queries[0] @ context.T * 0.05, dim=-1)
    assert torch.allclose(outputs[0][0], weights @ context[:, :LATENT], atol=1e-4)
