"""Tell from a checkpoint's configuration which tasks a model can do: generate, embed, classify, score.

The rules are those by which vLLM chooses what it runs a model for (its ``runner`` and ``convert``), as far as the names
of architectures say it. A model that these do not name is left to vLLM, which says at the engine's start what it does.
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pipemax.config import ChatMode, EngineConfig
from pipemax.endpoint_config import AnyConfig
from pipemax.generation import Sampling

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_OTHER_USE = ("runner", "convert", "hf_overrides", "model_impl", "config_format")
"""vLLM's own arguments that change what it runs a model for."""
_GENERATES = ("ForCausalLM", "ForConditionalGeneration", "LMHeadModel", "ChatModel")
_CLASSIFIES = ("ForSequenceClassification", "ClassificationModel")
_EMBEDS = re.compile(r"(ForTextEncoding|(?<!LM)(?<!LMHead)(?<!Chat)(?<!Reward)(?<!Classification)Model)$")


def check_tasks(config: AnyConfig, asked: Sequence[Sampling]) -> None:
    """Raise ``ValueError`` if rows are to have another task than the engine is started for."""
    for settings in asked:
        if settings.task != config.task:
            raise ValueError(
                f"the job's task is {settings.task}, and the engine config's is {config.task}; name the same task in "
                "both, or only in the job"
            )


def check_task(config: EngineConfig, model_config: "PreTrainedConfig", sampling: Sampling) -> None:
    """Raise ``ValueError``, with the remedy, if the model cannot do the task, or not in the way that is asked for."""
    if config.is_pooling and config.chat is ChatMode.ALWAYS:
        raise ValueError(
            f"chat is 'always', and the task {config.task} reads texts without a chat template; leave chat out"
        )
    if any(name in config.vllm_arguments for name in _OTHER_USE):
        return
    refusal = _refusal(config, model_config)
    if refusal is not None:
        raise ValueError(f"model {config.model!r} {refusal}")
    if sampling.dimensions is not None:
        _check_dimensions(config, model_config, sampling.dimensions)


def _refusal(config: EngineConfig, model_config: "PreTrainedConfig") -> str | None:
    name = next(iter(getattr(model_config, "architectures", None) or []), "")
    labels = int(getattr(model_config, "num_labels", 0) or 0)
    classifies, generates = name.endswith(_CLASSIFIES), name.endswith(_GENERATES)
    match config.task:
        case "generate":
            if classifies:
                return f"({name}) classifies and cannot generate; give the task classify or score (--task)"
            if _EMBEDS.search(name) or (generates and "Pooling" in _module_types(config)):
                return (
                    f"({name}) is an embedding model and cannot generate; give the task embed (--task embed)"
                )
        case "classify" if generates or _EMBEDS.search(name):
            return (
                f"({name}) has no classes; name a model for sequence classification, or have vLLM make one of it "
                "(vllm: {convert: classify})"
            )
        case "embed" if classifies:
            return f"({name}) classifies; name an embedding model, or give the task classify"
        case "score" if classifies and labels != 1:
            return f"({name}) has {labels} labels, and a cross-encoder that scores has one; give the task classify"
    return None


def _check_dimensions(config: EngineConfig, model_config: "PreTrainedConfig", dimensions: int) -> None:
    allowed = getattr(model_config, "matryoshka_dimensions", None)
    if not allowed and not getattr(model_config, "is_matryoshka", False):
        raise ValueError(
            f"dimensions is {dimensions}, and model {config.model!r} does not say that its embeddings can be cut "
            "(Matryoshka); leave dimensions out, or say it (vllm: {hf_overrides: {is_matryoshka: true}})"
        )
    if allowed and dimensions not in allowed:
        raise ValueError(f"dimensions is {dimensions}, must be one of {', '.join(map(str, allowed))}")
    size = _embedding_size(config, model_config)
    if size is not None and dimensions > size:
        raise ValueError(
            f"dimensions is {dimensions}, and the embeddings of model {config.model!r} have {size} values"
        )


def _embedding_size(config: EngineConfig, model_config: "PreTrainedConfig") -> int | None:
    """Return how many values an embedding has; None where a dense layer behind the model changes it."""
    if (size := getattr(model_config, "embedding_size", None)) is not None:
        return int(size)
    size = getattr(model_config.get_text_config(), "hidden_size", None)
    return None if size is None or "Dense" in _module_types(config) else int(size)


def _module_types(config: EngineConfig) -> set[str]:
    """Return the kinds of modules that a checkpoint of sentence-transformers lists; of another one, nothing."""
    file: str | Path | None = Path(config.model, "modules.json")
    if not Path(config.model).is_dir():
        from transformers.utils.hub import cached_file

        file = cached_file(
            config.model,
            "modules.json",
            revision=config.revision,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
        )
    if file is None or not Path(file).is_file():
        return set()
    modules = json.loads(Path(file).read_text(encoding="utf-8"))
    return {str(module.get("type", "")).rpartition(".")[2] for module in modules}
