"""The choices that an engine's config leaves to its user: the scheduler, chat templates, copies of KV, batching."""

from enum import StrEnum

from pipemax.domain.plan import Batching


class Policy(StrEnum):
    """The scheduler that decides which requests run."""

    VLLM = "vllm"
    """Stock vLLM: continuous batching, the KV cache only on the GPU."""
    PIPEMAX = "pipemax"
    """PipeMax inside vLLM: every request's KV also in host memory, batches rotated through the GPU."""
    AUTO = "auto"
    """The faster of the two, according to simulations of the measured engine; see docs/how/auto.md."""


class ChatMode(StrEnum):
    """Whether plain prompts are wrapped in the model's chat template."""

    AUTO = "auto"
    """Wrapped if the tokenizer has a chat template."""
    ALWAYS = "always"
    NEVER = "never"


class Waves(StrEnum):
    """Whether a batch that computes is overwritten by the next one, layer by layer."""

    AUTO = "auto"
    """Not: no GPU has run them yet."""
    ON = "on"
    OFF = "off"


class BatchingChoice(StrEnum):
    """The contents that a step of PipeMax may have, or the choice by simulations of the measured engine."""

    SEPARATED = "separated"
    """Phases of prefill and of decode, as in the paper."""
    MIXED = "mixed"
    """Each step decodes a batch and takes prompt tokens, up to a maximum."""
    AUTO = "auto"
    """Mixed, or the faster of the two in simulations of a short table; separated while nothing is measured."""

    @property
    def at_start(self) -> Batching:
        """The batching until simulations have chosen one."""
        return Batching.MIXED if self is BatchingChoice.MIXED else Batching.SEPARATED
