"""A model that cannot do a job's task is refused by its configuration, before anything is loaded."""

import json
from pathlib import Path

import pytest
from transformers import PreTrainedConfig

from pipemax.checkpoint.model_tasks import check_task
from pipemax.config import EngineConfig
from pipemax.generation import Sampling


def check(
    task: str, architecture: str, *, model: str = "m", vllm: object = None, **model_values: object
) -> None:
    config = EngineConfig.parse({"model": model, "task": task, "vllm": vllm or {}})
    sampling = Sampling(task=task, dimensions=model_values.pop("dimensions", None))  # type: ignore[arg-type]
    check_task(config, PreTrainedConfig(architectures=[architecture], **model_values), sampling)


@pytest.fixture
def empty(tmp_path: Path) -> str:
    """A model directory: the hub is not asked for its modules."""
    return str(tmp_path)


@pytest.mark.parametrize(
    ("task", "architecture", "reason"),
    [
        ("generate", "BertForSequenceClassification", "cannot generate; give the task classify or score"),
        ("generate", "BertModel", "cannot generate; give the task embed"),
        ("generate", "Qwen3Model", "cannot generate; give the task embed"),
        ("classify", "Qwen3ForCausalLM", "has no classes"),
        ("classify", "BertModel", "has no classes"),
        ("embed", "BertForSequenceClassification", "give the task classify"),
        ("score", "BertForSequenceClassification", "has 2 labels"),
    ],
)
def test_a_task_that_the_model_cannot_do_is_refused(
    task: str, architecture: str, reason: str, empty: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        check(task, architecture, model=empty)


@pytest.mark.parametrize(
    ("task", "architecture"),
    [
        ("generate", "Qwen3ForCausalLM"),
        ("generate", "GPT2LMHeadModel"),
        ("generate", "ChatGLMModel"),
        ("embed", "Qwen3ForCausalLM"),  # vLLM converts it
        ("embed", "BertModel"),
        ("classify", "BertForSequenceClassification"),
        ("score", "BertModel"),
        ("score", "Qwen3ForCausalLM"),
        ("classify", "SomethingElse"),  # left to vLLM
    ],
)
def test_other_tasks_are_left_to_vllm(task: str, architecture: str, empty: str) -> None:
    check(task, architecture, model=empty)


def test_a_checkpoint_of_sentence_transformers_embeds_whatever_its_architecture(tmp_path: Path) -> None:
    modules = [{"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"}]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(ValueError, match="is an embedding model and cannot generate"):
        check("generate", "Qwen3ForCausalLM", model=str(tmp_path))


def test_what_the_user_has_vllm_do_with_a_model_and_a_cross_encoder_are_left_to_vllm(empty: str) -> None:
    check("score", "BertForSequenceClassification", model=empty, num_labels=1)
    check("classify", "Qwen3ForCausalLM", model=empty, vllm={"convert": "classify"})


def test_embeddings_are_cut_only_for_models_that_say_so(empty: str) -> None:
    with pytest.raises(ValueError, match="does not say that its embeddings can be cut"):
        check("embed", "BertModel", model=empty, dimensions=8)
    with pytest.raises(ValueError, match="must be one of 16, 32"):
        check("embed", "BertModel", model=empty, dimensions=8, matryoshka_dimensions=[16, 32])
    check("embed", "BertModel", model=empty, dimensions=8, is_matryoshka=True)


def test_embeddings_are_cut_to_no_more_values_than_they_have(tmp_path: Path) -> None:
    def check_cut(to: int, **model_values: object) -> None:
        check("embed", "BertModel", model=str(tmp_path), dimensions=to, is_matryoshka=True, **model_values)

    check_cut(32, hidden_size=32)
    with pytest.raises(ValueError, match=r"dimensions is 33, and the embeddings of model .* have 32 values"):
        check_cut(33, hidden_size=32)
    check_cut(33, hidden_size=32, embedding_size=64)
    (tmp_path / "modules.json").write_text(json.dumps([{"type": "sentence_transformers.models.Dense"}]))
    check_cut(33, hidden_size=32)  # the dense layer's size is left to vLLM


def test_a_chat_template_is_for_generation(empty: str) -> None:
    config = EngineConfig.parse({"model": empty, "task": "embed", "chat": "always"})
    with pytest.raises(ValueError, match="without a chat template"):
        check_task(config, PreTrainedConfig(architectures=["BertModel"]), Sampling(task="embed"))
