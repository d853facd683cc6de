"""The choices that an engine's config leaves to its user: when KV is copied to the host, and what a step may hold."""

from enum import StrEnum

from pipemax.domain.plan import Batching


class KvOffload(StrEnum):
    """The time at which new KV is copied to the host."""

    AFTER_STEP = "after_step"
    """All layers together once a step has computed; full CUDA graphs stay."""
    PER_LAYER = "per_layer"
    """Each layer's KV directly after its attention, put into blocks by the CPU. PipeMax, §3.4.2, begins after the QKV
    projection, where vLLM has no hook."""


class BatchingChoice(StrEnum):
    """The contents that a step of PipeMax may have, or the choice by simulations of the measured engine."""

    SEPARATED = "separated"
    """Phases of prefill and of decode, as in the paper."""
    MIXED = "mixed"
    """Each step decodes a batch and takes prompt tokens, up to a maximum."""
    AUTO = "auto"
    """The faster of the two, according to simulations; separated while nothing is measured."""

    @property
    def at_start(self) -> Batching:
        """The batching until simulations have chosen one."""
        return Batching.MIXED if self is BatchingChoice.MIXED else Batching.SEPARATED
