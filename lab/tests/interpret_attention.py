"""Run under TRITON_INTERPRET=1, which Triton reads when it is imported: the kernel as it stands, on the CPU."""

import torch

from lab.bench.stage.attention import gathered_decode, paged_decode_gqa


def main() -> None:
    generator = torch.Generator().manual_seed(0)
    # One layer of a block-first pool of two: (num_blocks, kv_heads, block_tokens, 2 · head_dim), strided.
    kv = torch.randn(20, 2, 2, 16, 32, generator=generator)[:, 1]
    query = torch.randn(3, 4, 16, generator=generator)
    tables = torch.randperm(20, generator=generator)[:18].view(3, 6).to(torch.int32)
    lengths = torch.tensor([1, 65, 96], dtype=torch.int32)
    result = paged_decode_gqa(query, kv, tables, lengths)
    torch.testing.assert_close(result, gathered_decode(query, kv, tables, lengths))
    lengths[1] = 64  # a token less is another result: the comparison would notice
    assert not torch.allclose(result[1], gathered_decode(query, kv, tables, lengths)[1])
    print("equal")


if __name__ == "__main__":
    main()
