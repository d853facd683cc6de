"""A loader of random weights whose greedy tokens depend on all of the KV, and an extension that has workers know it.

vLLM's own dummy weights are so small that a model repeats the last token whatever its KV holds. Here the scale of each
matrix follows its rows' length, and the attention's are larger, so that a request attends to few tokens and another
block there is another answer. The same name and shape give the same weights in every engine.
"""

import math
from zlib import crc32

import torch
from torch import nn
from vllm.config import ModelConfig
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

LOAD_FORMAT = "pipemax_random"
_ATTENTION_GAIN = 2.5


@register_model_loader(LOAD_FORMAT)
class RandomWeights(BaseModelLoader):
    """Reads nothing."""

    def download_model(self, model_config: ModelConfig) -> None:
        pass

    def load_weights(self, model: nn.Module, model_config: ModelConfig) -> None:
        for name, weight in model.named_parameters():
            draw_weight(name, weight.data)


class KnowsRandomWeights:
    """An extension of vLLM's workers that adds nothing: each imports this module for it, before its model is loaded."""


def draw_weight(name: str, weight: torch.Tensor) -> None:
    """Fill a model's parameter in place."""
    if not weight.is_floating_point():
        raise ValueError(f"weight {name} is of {weight.dtype}, which random weights cannot be")
    if weight.ndim < 2:
        weight.fill_(1.0 if name.endswith("weight") else 0.0)
        return
    gain = _ATTENTION_GAIN if "attn" in name or "attention" in name else 1.0
    generator = torch.Generator(device=weight.device).manual_seed(crc32(name.encode()))
    weight.normal_(0.0, gain / math.sqrt(weight.shape[-1]), generator=generator)
