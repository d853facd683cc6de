"""Random weights are the same wherever a parameter has the same name and shape."""

import pytest
import torch

from pipemax.vllm_ext.node_check.random_weights import draw_weight


def drawn(name: str, *shape: int) -> torch.Tensor:
    weight = torch.full(shape, torch.nan)
    draw_weight(name, weight)
    return weight


def test_two_engines_have_the_same_weights_and_two_layers_have_not() -> None:
    first = drawn("layers.0.mlp.up_proj.weight", 8, 16)
    assert torch.equal(first, drawn("layers.0.mlp.up_proj.weight", 8, 16))
    assert not torch.equal(first, drawn("layers.1.mlp.up_proj.weight", 8, 16))


def test_a_matrix_keeps_the_scale_of_its_input_and_attention_stands_out() -> None:
    plain = drawn("layers.0.mlp.up_proj.weight", 256, 1024)
    attention = drawn("layers.0.self_attn.qkv_proj.weight", 256, 1024)
    assert float(plain.std()) * 32 == pytest.approx(1.0, rel=0.05)
    assert float(attention.std()) * 32 == pytest.approx(2.5, rel=0.05)


def test_norms_are_one_and_biases_zero() -> None:
    assert torch.equal(drawn("layers.0.input_layernorm.weight", 4), torch.ones(4))
    assert torch.equal(drawn("layers.0.self_attn.qkv_proj.bias", 4), torch.zeros(4))


def test_packed_weights_are_refused() -> None:
    with pytest.raises(ValueError, match=r"qweight is of torch\.int32"):
        draw_weight("layers.0.qweight", torch.zeros(2, 2, dtype=torch.int32))
