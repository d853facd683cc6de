"""A job with images is refused before an engine starts if its model or its engine config takes none."""

from typing import Any

import pytest
from transformers import PreTrainedConfig

from pipemax.config import EngineConfig
from pipemax.serve.start_checks import check_images
from pipemax.vllm_ext.seam.model_registry import is_text_only


@pytest.mark.parametrize(
    ("architecture", "only_text"),
    [
        ("LlamaForCausalLM", True),
        ("Qwen3ForCausalLM", True),
        ("LlavaForConditionalGeneration", False),
        ("Qwen2_5_VLForConditionalGeneration", False),
        ("SomethingOfNextYear", False),
    ],
)
def test_vllm_s_tables_say_which_models_take_text_only(architecture: str, only_text: bool) -> None:
    assert is_text_only([architecture]) is only_text


@pytest.mark.parametrize(
    ("config", "architecture", "says"),
    [
        ({"policy": "vllm"}, "LlamaForCausalLM", r"\(LlamaForCausalLM\) takes text only"),
        ({"policy": "pipemax"}, "LlavaForConditionalGeneration", "loads the text part of a model only"),
        (
            {"policy": "vllm", "vllm": {"language_model_only": True}},
            "LlavaForConditionalGeneration",
            "leave language_model_only out",
        ),
    ],
)
def test_what_cannot_take_images_is_refused(config: dict[str, Any], architecture: str, says: str) -> None:
    model_config = PreTrainedConfig(architectures=[architecture])
    with pytest.raises(ValueError, match=says):
        check_images(EngineConfig.parse({"model": "m", **config}), model_config)


def test_a_model_with_image_input_is_taken() -> None:
    model_config = PreTrainedConfig(architectures=["LlavaForConditionalGeneration"])
    check_images(EngineConfig.parse({"model": "m", "policy": "vllm"}), model_config)
