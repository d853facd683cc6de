"""How long a prompt with its output may be."""

from typing import TYPE_CHECKING

from pipemax.config import EngineConfig

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def max_model_len(config: EngineConfig, model_config: "PreTrainedConfig") -> int:
    """Return the tokens: as configured, otherwise the model's own limit.

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
