"""Settings from the launcher to the scheduler and the workers, through vLLM's ``kv_connector_extra_config``.

The scheduler and the workers live in other processes and see only that dictionary of plain values.
"""

from dataclasses import asdict, dataclass, field
from typing import Any, Self

from pipemax.control.controller_config import ControllerConfig, StageConfig
from pipemax.domain.kv_groups import WHOLE_KV, KvGroups
from pipemax.domain.plan import Batching
from pipemax.domain.step_times import Segment, StepTimeModel

_KEY = "pipemax"
FOLLOWS_LAYERS = "follows_layers"
"""In vLLM's ``kv_connector_extra_config`` from the first on: the connector is called between layers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeSettings:
    """The settings, as plain values only: vLLM pickles and hashes them."""

    host_kv_tokens: int
    """Tokens whose KV the host pool holds, the same on every stage. Not blocks: workers may choose the size of a block
    when the model is loaded."""
    num_batches: int
    """n of the paper."""
    max_num_seqs: int
    """Maximum of requests in one step; vLLM's own number of that name is the runner's slots."""
    stages: tuple[dict[str, Any], ...]
    """One encoded ``StageConfig`` per stage."""
    stores_tokens: bool = False
    """New tokens' KV goes to the host token by token after each step, if the device has a kernel for it."""
    whole_prompts: bool = False
    """No prompt is computed in several steps."""
    batching: str = Batching.SEPARATED.value
    mixed_step_tokens: int | None = None
    """Maximum tokens of a mixed step; None takes vLLM's maximum of any step."""
    wave_groups: int | None = None
    """Groups of layers in which a step with waves computes; None for an engine without waves."""
    controller: dict[str, Any] = field(default_factory=dict)
    """Further fields of ``ControllerConfig``, by name."""

    def to_extra_config(self) -> dict[str, Any]:
        return {_KEY: asdict(self)}

    @classmethod
    def from_extra_config(cls, extra_config: dict[str, Any]) -> Self:
        values = dict(extra_config[_KEY])
        values["stages"] = tuple(values["stages"])
        return cls(**values)

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
            "stages": tuple(decode_stage(stage) for stage in self.stages),
            "gpu_blocks": gpu_blocks,
            "host_blocks": self.host_blocks(block_tokens),
            "block_tokens": block_tokens,
            "kv_groups": groups,
            "max_num_seqs": self.max_num_seqs,
            "prefill_chunk_tokens": prefill_chunk_tokens,
            "max_resident_requests": max_slots,
            "whole_prompts": self.whole_prompts,
            "batching": Batching(self.batching),
            "mixed_step_tokens": self.mixed_step_tokens,
            "wave_groups": self.wave_groups,
        }
        return ControllerConfig(**(known | self.controller))


def encode_stage(stage: StageConfig) -> dict[str, Any]:
    """Encode a stage as plain values, for ``RuntimeSettings.stages``."""
    return asdict(stage)


def decode_stage(values: dict[str, Any]) -> StageConfig:
    """Decode what ``encode_stage`` returned."""
    return StageConfig(
        kv_bytes_per_token=values["kv_bytes_per_token"],
        h2d_bytes_per_s=values["h2d_bytes_per_s"],
        decode_time=_decode_model(values["decode_time"]),
        prefill_time=_decode_model(values["prefill_time"]),
        mixed_scales=tuple(values["mixed_scales"]),
    )


def _decode_model(values: dict[str, Any]) -> StepTimeModel:
    return StepTimeModel(
        segments=tuple(Segment(**segment) for segment in values["segments"]), beta_s=values["beta_s"]
    )
