"""Loads the tokenizer that an engine config names, without its model. It imports ``transformers`` only when called."""

from typing import TYPE_CHECKING

from pipemax.config import EngineConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load_tokenizer(config: EngineConfig) -> "PreTrainedTokenizerBase":
    """Return the tokenizer of the config's model, or the one that it names besides. ``ValueError`` if there is none."""
    from transformers import AutoTokenizer  # takes two seconds

    name = config.tokenizer or config.model
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            name, revision=config.revision, trust_remote_code=config.trust_remote_code
        )
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"tokenizer {name!r} cannot be read: {first_line(error)}") from error
    return tokenizer


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its type if it has none."""
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
