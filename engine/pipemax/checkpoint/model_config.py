"""Reads a checkpoint's configuration and tokenizer, without weights and without vLLM."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

from pipemax.config import EngineConfig

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase


def read_model_config(config: EngineConfig) -> "PreTrainedConfig":
    """Return the configuration of the config's model. Raise ``ValueError`` if it cannot be read."""
    try:
        _check_model_path(config.model)
    except OSError as error:  # it is where this user may not look
        raise ValueError(f"model {config.model!r} cannot be read: {error.strerror}") from error
    # No progress bars: standard output carries the reply of a preflight. Warnings go to standard error.
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    from transformers import AutoConfig  # takes two seconds: only if a model is looked at

    try:
        model_config: PreTrainedConfig = AutoConfig.from_pretrained(
            config.model, revision=config.revision, trust_remote_code=config.trust_remote_code
        )
    except Exception as error:  # whatever the library makes of a file that is no such configuration
        where = (
            "" if Path(config.model).is_dir() else " (no directory of that name here, so taken as a hub name)"
        )
        raise ValueError(f"model {config.model!r}{where} cannot be read: {_first_line(error)}") from error
    for name in ("num_hidden_layers", "hidden_size"):
        value = getattr(model_config.get_text_config(), name, None)
        if isinstance(value, int) and value < 1:
            raise ValueError(f"model {config.model!r} cannot be read: its config.json has {name} {value}")
    return model_config


def load_tokenizer(config: EngineConfig) -> "PreTrainedTokenizerBase":
    """Return the tokenizer of the config's model, or the one that it names besides. ``ValueError`` if there is none."""
    from transformers import AutoTokenizer  # takes two seconds

    name = config.tokenizer or config.model
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            name, revision=config.revision, trust_remote_code=config.trust_remote_code
        )
    except Exception as error:  # as above
        raise ValueError(f"tokenizer {name!r} cannot be read: {_first_line(error)}") from error
    return tokenizer


def max_model_len(config: EngineConfig, model_config: "PreTrainedConfig") -> int:
    """Return how many tokens a prompt with its output may have: as configured, otherwise the model's own limit.

    Raise ``ValueError`` if the model does not say it, or was made for fewer than are configured.
    """
    positions = getattr(model_config.get_text_config(), "max_position_embeddings", None)
    if config.max_model_len is None:
        if positions is None:
            raise ValueError(f"model {config.model!r} does not say its length; give max_model_len")
        return int(positions)
    if positions is not None and config.max_model_len > positions:
        raise ValueError(
            f"max_model_len is {config.max_model_len}, but {config.model!r} was made for at most {positions} tokens; "
            "leave max_model_len out or lower it"
        )
    return config.max_model_len


def _check_model_path(model: str) -> None:
    path = Path(model)
    looks_like_path = path.is_absolute() or model.startswith((".", "~")) or model.count("/") > 1
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ValueError(
                f"model directory {model!r} holds no config.json; give a Hugging Face checkpoint"
            )
    elif path.exists():
        raise ValueError(f"model {model!r} is a file; give the checkpoint's directory")
    elif looks_like_path:
        raise ValueError(f"model directory {model!r} does not exist on {os.uname().nodename}")


def _first_line(error: BaseException) -> str:
    """Return the first sentence of an error's message, or its type if it has none."""
    lines = [line.strip() for line in str(error).strip().splitlines()] or [type(error).__name__]
    return " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
