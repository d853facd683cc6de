"""The stage that the benches run computes attention over pages as plain attention would."""

import os
import subprocess
import sys

import pytest
import torch

from lab.bench.stage.model import DecodeBatch, LlamaStage, TokenPlaces
from pipemax.domain.specs import ModelSpec
from pipemax.transfer.layout import compact_layout, layer_views

TINY = ModelSpec(
    name="tiny",
    num_layers=2,
    hidden_size=32,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    ffn_size=64,
    num_experts=1,
    experts_per_token=1,
    vocab_size=100,
    bytes_per_value=4,
)
CPU = torch.device("cpu")


def test_the_triton_kernel_equals_plain_attention() -> None:
    pytest.importorskip("triton", reason="torch came without Triton")
    done = subprocess.run(
        [sys.executable, "-m", "lab.tests.interpret_attention"],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "equal\n", done.stderr


def tokens_of(table: list[int], first: int, count: int) -> TokenPlaces:
    positions = range(first, first + count)
    return TokenPlaces(
        blocks=torch.tensor([table[p // 4] for p in positions]),
        slots=torch.tensor([p % 4 for p in positions]),
    )


def test_a_prompt_and_a_token_after_it_make_what_the_whole_prompt_makes() -> None:
    layout = compact_layout(num_layers=2, num_kv_heads=2, block_tokens=4, content_bytes=2 * 16 * 4)
    stage = LlamaStage(TINY, 2, CPU, torch.float32)
    hidden = stage.hidden(10)
    rows = torch.full(layout.pool_shape(8), 0xFF, dtype=torch.uint8)  # NaN wherever nothing was written
    kv = layer_views(rows, layout, torch.float32)
    whole = stage.prefill_prompts(hidden, kv, tokens_of([5, 0, 3], 0, 10), prompt_tokens=10)
    table = [2, 7, 1]
    parts = [stage.prefill_prompts(hidden[:9], kv, tokens_of(table, 0, 9), prompt_tokens=9)]
    batch = DecodeBatch(
        places=tokens_of(table, 9, 1),
        tables=torch.tensor([table], dtype=torch.int32),
        lengths=torch.tensor([10], dtype=torch.int32),
    )
    parts.append(stage.decode(hidden[9:], kv, batch))
    torch.testing.assert_close(torch.cat(parts), whole)
    for layer in kv:
        written = layer[[5, 0]]
        torch.testing.assert_close(layer[[2, 7]], written)
