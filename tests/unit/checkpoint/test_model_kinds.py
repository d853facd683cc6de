"""Which models policy pipemax can serve, as their configurations tell."""

import pytest
import transformers
from transformers import PreTrainedConfig

from pipemax.checkpoint.model_kinds import has_windows, refusal_under_pipemax


@pytest.mark.parametrize(
    "name",
    [
        *(
            "BambaConfig",
            "FalconH1Config",
            "GraniteMoeHybridConfig",
            "JambaConfig",
            "Lfm2Config",
            "Mamba2Config",
        ),
        *(
            "MambaConfig",
            "MiniMaxConfig",
            "NemotronHConfig",
            "OlmoHybridConfig",
            "Qwen3NextConfig",
            "Qwen3_5Config",
        ),
        *("RecurrentGemmaConfig", "RwkvConfig", "Zamba2Config"),
    ],
)
def test_models_with_recurrent_layers_are_refused(name: str) -> None:
    config: PreTrainedConfig = getattr(transformers, name)()
    assert (refusal_under_pipemax(config) or "").startswith("has Mamba or linear-attention layers (")


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("T5Config", "is an encoder-decoder"),
        ("DeepseekV32Config", "has sparse latent attention"),
        ("Gemma3nConfig", "has layers that share the KV of others"),
        ("Gemma4Config", "has layers whose KV differs in size"),
    ],
)
def test_other_models_that_are_refused_have_their_reason(name: str, why: str) -> None:
    assert why in (refusal_under_pipemax(getattr(transformers, name)()) or "")


@pytest.mark.parametrize(
    ("name", "windows"),
    [
        ("LlamaConfig", False),
        ("Qwen2Config", False),
        ("Qwen3Config", False),
        ("MistralConfig", True),
        ("MinistralConfig", True),
        ("GptOssConfig", True),
        ("Gemma2Config", True),
        ("Gemma3Config", True),
        ("Llama4Config", True),
        ("Mistral3Config", False),
        ("DeepseekV2Config", False),
        ("DeepseekV3Config", False),
    ],
)
def test_other_decoders_are_told_by_their_attention(name: str, windows: bool) -> None:
    config: PreTrainedConfig = getattr(transformers, name)()
    assert refusal_under_pipemax(config) is None
    assert has_windows(config) == windows
