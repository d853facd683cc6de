"""The largest step that stock vLLM is started for: by the rows that the KV cache holds and by their lengths."""

from dataclasses import replace

import pytest

from pipemax.domain.envelope import RowShape, StartEnvelope, graph_sizes, plan_envelope
from pipemax.domain.specs import ModelSpec, Parallelism
from pipemax.domain.step_records import StepLimits
from pipemax.presets import load_model, load_node

H100, L20 = load_node("h100x8"), load_node("l20x8")
ONE = Parallelism(pipeline=1, tensor=1)
OF_H100 = StepLimits(step_tokens=16_384, running_rows=1_024)
OF_L20 = StepLimits(step_tokens=8_192, running_rows=256)
"""vLLM's defaults for offline batches."""
CHAT = RowShape(prompt_tokens=300, output_tokens=100)
CLASSIFY = RowShape(prompt_tokens=2_000, output_tokens=20)
QWEN3_1_7B = ModelSpec(
    name="Qwen3-1.7B",
    num_layers=28,
    hidden_size=2_048,
    num_heads=16,
    num_kv_heads=8,
    head_dim=128,
    ffn_size=6_144,
    num_experts=1,
    experts_per_token=1,
    vocab_size=151_936,
    bytes_per_value=2,
    has_tied_embeddings=True,
)


def on_h100(row: RowShape, model: ModelSpec = QWEN3_1_7B, **more: bool) -> StartEnvelope:
    return plan_envelope(H100, model, ONE, row, OF_H100, **more)


def test_short_rows_of_a_small_model_get_more_rows_up_to_what_their_logits_may_take() -> None:
    envelope = on_h100(CHAT)
    assert envelope.rows_of_kv == pytest.approx(1_750, rel=0.05)
    gpu_bytes = H100.gpu.memory_bytes
    assert envelope.ceiling.running_rows % 8 == 0
    assert 1_024 < envelope.ceiling.running_rows <= 0.02 * gpu_bytes / (8 * 151_936)
    assert envelope.ceiling.step_tokens == OF_H100.step_tokens
    assert envelope.begin == OF_H100
    assert envelope.graph_rows == 1_024
    assert 0 < envelope.cost_bytes < 0.02 * gpu_bytes


def test_on_a_smaller_gpu_rows_are_those_of_the_kv_cache_and_a_seventh_more() -> None:
    envelope = plan_envelope(L20, QWEN3_1_7B, ONE, replace(CHAT, prompt_tokens=600), OF_L20)
    rows = envelope.ceiling.running_rows
    assert 1.15 * envelope.rows_of_kv <= rows < 1.15 * envelope.rows_of_kv + 9
    assert envelope.graph_rows == rows


def test_long_prompts_with_short_outputs_get_steps_twice_as_long() -> None:
    envelope = on_h100(CLASSIFY)
    assert envelope.ceiling == StepLimits(step_tokens=32_768, running_rows=1_024)
    assert envelope.graph_rows < 400, "no more rows than the KV cache holds decode together"


def test_an_envelope_of_fewer_rows_costs_less_and_begins_within_them() -> None:
    envelope = on_h100(CHAT)
    fewer = envelope.with_rows(617)
    assert fewer.ceiling == fewer.begin == StepLimits(step_tokens=16_384, running_rows=617)
    assert (fewer.graph_rows, fewer.cost_bytes) == (617, 0)
    assert envelope.with_rows(100_000) == envelope


def test_steps_stay_as_they_are_where_their_activations_would_take_too_much() -> None:
    wide = replace(load_model("qwen3-32b"), num_layers=8)
    node = replace(L20, gpu=replace(L20.gpu, memory_bytes=30 << 30))
    assert plan_envelope(node, wide, ONE, CLASSIFY, OF_L20).ceiling.step_tokens == OF_L20.step_tokens


def test_nothing_is_below_vllm_s_default_where_the_kv_cache_holds_few_rows() -> None:
    envelope = on_h100(RowShape(prompt_tokens=8_000, output_tokens=8_000), load_model("qwen3-8b"))
    assert envelope.ceiling == envelope.begin == OF_H100
    assert envelope.cost_bytes == 0


@pytest.mark.parametrize("row", [CHAT, CLASSIFY])
def test_the_user_s_own_limits_are_kept(row: RowShape) -> None:
    own = StepLimits(step_tokens=2_048, running_rows=3_000)
    envelope = plan_envelope(H100, QWEN3_1_7B, ONE, row, own, keeps_rows=True, keeps_tokens=True)
    assert envelope.ceiling == envelope.begin == own
    rows_kept = plan_envelope(
        H100, QWEN3_1_7B, ONE, CLASSIFY, replace(OF_H100, running_rows=64), keeps_rows=True
    )
    assert rows_kept.ceiling.running_rows == 64
    assert rows_kept.ceiling.step_tokens == OF_H100.step_tokens, "64 rows need no longer steps"


def test_a_model_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="does not fit"):
        plan_envelope(L20, load_model("llama2-70b"), ONE, CHAT, OF_L20)


def test_graphs_above_512_rows_are_32_rows_apart_and_the_largest_is_there() -> None:
    assert graph_sizes(4) == [1, 2, 4]
    sizes = graph_sizes(1_000)
    assert sizes[:4] == [1, 2, 4, 8]
    assert [size for size in sizes if size > 512] == [*range(544, 1_000, 32), 1_000]
    assert graph_sizes(1_024)[-2:] == [992, 1_024]
