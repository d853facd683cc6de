"""A measured engine in the simulator: a calibration's stage times and copy rates replace a node's and a model's.

The simulated systems keep their own rules; this module says how long their steps take and what fits. It knows nothing
of weights, layers or links beyond what was measured, so it cannot simulate other layouts or nodes. A stage's bytes and
rates are those of one of its GPUs, and its times include their all-reduces.
"""

from dataclasses import dataclass, replace

from pipemax.control.controller_config import StageConfig
from pipemax.domain.hardware import AllReduceSpec, GpuSpec, LinkSpec
from pipemax.domain.specs import KvCapacity, ModelSpec, NodeSpec
from pipemax.domain.step_times import mixed_step_s
from pipemax.sim.stage_times import StepWork

_UNBOUNDED = 1e18


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredEngine:
    """An engine that has started, as its calibration describes it."""

    stages: tuple[StageConfig, ...]
    round_trip_s: float
    """From the end of a batch's step on the last stage to its next step on the first."""
    capacity: KvCapacity
    """Under PipeMax, with the whole KV of layers that have windows."""
    windowed_capacity: KvCapacity | None = None
    """Under stock vLLM, which frees what is older than a window; None for a model without windows."""
    num_batches: int
    """n of the paper."""
    wave_groups: int | None = None
    """Groups of layers in which a step of PipeMax with waves computes; None without waves."""
    max_num_seqs: int
    """Maximum number of requests in one step of PipeMax, or running at once under stock vLLM."""
    max_batched_tokens: int
    """Maximum number of tokens in one step."""
    max_model_len: int
    times_are_a_guess: bool = False
    """Whether the calibration misses many of the steps that it was fitted to."""

    @property
    def stock_capacity(self) -> KvCapacity:
        """The KV blocks under stock vLLM."""
        return self.windowed_capacity or self.capacity

    def with_steps_of(self, tokens: int) -> "MeasuredEngine":
        """Return the engine with steps of at most this many tokens; vLLM runs no more requests than that at once."""
        return replace(self, max_batched_tokens=tokens, max_num_seqs=min(self.max_num_seqs, tokens))

    def in_grains(self, grain: int) -> "MeasuredEngine":
        """Return the engine whose tokens have the KV of ``grain`` tokens, and take as long to read.

        ``grain`` must divide the tokens of a block. See ``workloads.in_grains``.
        """
        if grain == 1:
            return self
        stages = tuple(
            replace(
                stage,
                kv_bytes_per_token=stage.kv_bytes_per_token * grain,
                decode_time=replace(stage.decode_time, beta_s=stage.decode_time.beta_s * grain),
                prefill_time=replace(stage.prefill_time, beta_s=stage.prefill_time.beta_s * grain),
            )
            for stage in self.stages
        )
        windowed = self.windowed_capacity
        return replace(
            self,
            stages=stages,
            capacity=_in_grains(self.capacity, grain),
            windowed_capacity=None if windowed is None else _in_grains(windowed, grain),
            max_model_len=self.max_model_len // grain,
        )

    def node(self) -> NodeSpec:
        """Return a node with one device per stage, whose links copy at the measured rate; nothing else bounds them."""
        rate = min(stage.h2d_bytes_per_s for stage in self.stages)
        return NodeSpec(
            name="measured",
            gpu=GpuSpec(
                name="measured",
                memory_bytes=1,
                hbm_bytes_per_s=_UNBOUNDED,
                flops_per_s=_UNBOUNDED,
                step_overhead_s=0.0,
                product_tokens=((1, 1),),
                smoothing=1.0,
            ),
            num_gpus=len(self.stages),
            link=LinkSpec(
                host_to_gpu_bytes_per_s=rate,
                gpu_to_host_bytes_per_s=rate,
                duplex_bytes_per_s=2 * rate,
                per_copy_s=0.0,
                peer_bytes_per_s=_UNBOUNDED,
                peer_latency_s=0.0,
            ),
            gpus_per_root=len(self.stages),
            root_bytes_per_s=_UNBOUNDED,
            host_dram_bytes_per_s=_UNBOUNDED,
            host_memory_bytes=1.0,
            host_kv_fraction=1.0,
            gpu_memory_fraction=1.0,
            gpu_reserve_bytes=0.0,
            all_reduce=AllReduceSpec(bus_bytes_per_s=_UNBOUNDED, latency_s=0.0),
        )

    def model(self) -> ModelSpec:
        """Return a model that is only a name: its shapes are in the stages' times."""
        return ModelSpec(
            name="measured",
            num_layers=len(self.stages),
            hidden_size=1,
            num_heads=1,
            num_kv_heads=1,
            head_dim=1,
            ffn_size=1,
            num_experts=1,
            experts_per_token=1,
            vocab_size=1,
            bytes_per_value=1,
        )


def _in_grains(capacity: KvCapacity, grain: int) -> KvCapacity:
    groups = replace(capacity.groups, window_tokens=capacity.groups.window_tokens // grain)
    return replace(capacity, block_tokens=capacity.block_tokens // grain, groups=groups)


class MeasuredTimes:
    """Implements the part of ``stage_times.StageTimes`` that a machine uses."""

    def __init__(self, engine: MeasuredEngine) -> None:
        self._stages = engine.stages
        self._distinct = [*dict.fromkeys(engine.stages)]
        self._distinct_of = [self._distinct.index(stage) for stage in engine.stages]
        self.layers = (1,) * len(engine.stages)

    def stage_s(self, work: StepWork) -> list[float]:
        """Return the seconds on each stage."""
        seconds = [
            mixed_step_s(
                stage.decode_time,
                stage.prefill_time,
                num_decodes=work.decode_requests,
                kv_tokens=work.decode_context_tokens,
                prompt_tokens=work.prefill_tokens,
                token_pairs=round(work.prefill_pairs),
                mixed_scales=stage.mixed_scales,
            )
            for stage in self._distinct
        ]
        return [seconds[index] for index in self._distinct_of]

    def all_reduce_layer_s(self, tokens: int) -> float:
        """Return 0: the measured times include it."""
        return 0.0

    def activation_bytes(self, tokens: int) -> float:
        """Return 0: the measured times include sending activations."""
        return 0.0

    def kv_bytes_per_token(self, stage: int) -> int:
        return self._stages[stage].kv_bytes_per_token
