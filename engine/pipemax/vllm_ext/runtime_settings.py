"""Settings from the launcher to the scheduler and the workers, through vLLM's ``kv_connector_extra_config``.

The scheduler and the workers live in other processes and see only that dictionary of plain values.
"""

from dataclasses import dataclass, field
from typing import Any, Self

from pipemax.control.controller_config import ControllerConfig, StageConfig
from pipemax.domain.kv_groups import WHOLE_KV, KvGroups
from pipemax.domain.plain_values import decode, encode
from pipemax.domain.plan import Batching

_KEY = "pipemax"
FOLLOWS_LAYERS = "follows_layers"
"""In vLLM's ``kv_connector_extra_config`` from the first on: the connector is called between layers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeSettings:
    """The settings."""

    host_kv_tokens: int
    """Tokens whose KV the host pool holds, the same on every stage. Not blocks: workers may choose the size of a block
    when the model is loaded."""
    num_batches: int
    """n of the paper."""
    max_num_seqs: int
    """Maximum of requests in one step; vLLM's own number of that name is the runner's slots."""
    stages: tuple[StageConfig, ...]
    stores_tokens: bool = False
    """New tokens' KV goes to the host token by token after each step, if the device has a kernel for it."""
    whole_prompts: bool = False
    """No prompt is computed in several steps."""
    batching: Batching = Batching.SEPARATED
    mixed_step_tokens: int | None = None
    """Maximum tokens of a mixed step; None takes vLLM's maximum of any step."""
    wave_groups: int | None = None
    """Groups of layers in which a step with waves computes; None for an engine without waves."""
    controller: dict[str, Any] = field(default_factory=dict)
    """Further fields of ``ControllerConfig``, by name."""

    def to_extra_config(self) -> dict[str, Any]:
        """Return plain values only: vLLM pickles and hashes them."""
        return {_KEY: encode(self)}

    @classmethod
    def from_extra_config(cls, extra_config: dict[str, Any]) -> Self:
        settings: Self = decode(cls, extra_config[_KEY])
        return settings

    def host_blocks(self, block_tokens: int) -> int:
        """Return the KV blocks of the host pool, once the size of a block is known."""
        return self.host_kv_tokens // block_tokens

    def controller_config(
        self,
        *,
        gpu_blocks: int,
        block_tokens: int,
        prefill_chunk_tokens: int,
        max_slots: int,
        groups: KvGroups = WHOLE_KV,
    ) -> ControllerConfig:
        """Complete the settings with what the scheduler knows. ``ValueError`` on a bad value."""
        known: dict[str, Any] = {
            "num_batches": self.num_batches,
            "stages": self.stages,
            "gpu_blocks": gpu_blocks,
            "host_blocks": self.host_blocks(block_tokens),
            "block_tokens": block_tokens,
            "kv_groups": groups,
            "max_num_seqs": self.max_num_seqs,
            "prefill_chunk_tokens": prefill_chunk_tokens,
            "max_resident_requests": max_slots,
            "whole_prompts": self.whole_prompts,
            "batching": self.batching,
            "mixed_step_tokens": self.mixed_step_tokens,
            "wave_groups": self.wave_groups,
        }
        return ControllerConfig(**(known | self.controller))
