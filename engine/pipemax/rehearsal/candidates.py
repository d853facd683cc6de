"""What an engine config says on a node that is not there: the part of the node, and the settings to rehearse.

Where the config leaves the policy, the batching or the size of a step open, the simulator ranks a few of each. This
module knows no vLLM and starts nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from pipemax.config import BatchingChoice, EngineConfig, KvOffload, Policy
from pipemax.domain.plan import Batching
from pipemax.domain.specs import ModelSpec, NodeSpec, Parallelism, freeing_windows_pays, kv_capacity
from pipemax.domain.units import GIB
from pipemax.sim.machine import BLOCK_TOKENS
from pipemax.sim.result import SimulationResult
from pipemax.sim.systems.continuous import ContinuousBatching, vllm_032
from pipemax.sim.systems.pipemax import PipeMaxSystem
from pipemax.sim.systems.pipemax_config import MIXED_TOKENS_TO_TRY, PipeMaxOptions, mixed_batching
from pipemax.sim.systems.scenario import Scenario
from pipemax.sim.workloads import Workload

STOCK_STEP_TOKENS = (256, 512, 2048, 8192)
PREFILL_STEP_TOKENS = (1024, 4096)
MAX_NUM_SEQS = 1024
"""Where the config has none: vLLM's own default on GPUs of 70 GiB and more; below that it is 256."""
_POOL_FILLS = 3
_FEWEST_ROWS, _MOST_ROWS = 200, 2000
_BYTES_OF_DTYPE = {"bfloat16": 2, "float16": 2, "float32": 4}
_HARMLESS_VLLM_ARGUMENTS = {"async_scheduling": True, "enable_chunked_prefill": True}


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePart:
    """One engine's part of a node."""

    node: NodeSpec
    num_engines: int
    """Engines that run on the whole node."""
    parallelism: Parallelism


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One way to run the engine."""

    policy: Policy
    batching: Batching
    chunk_tokens: int
    max_num_seqs: int

    @property
    def name(self) -> str:
        return "vllm" if self.policy is Policy.VLLM else f"pipemax {self.batching.value}"

    def config_values(self) -> dict[str, Any]:
        """Return the fields of ``EngineConfig`` that it sets."""
        batching: dict[str, Any] = {}
        if self.policy is Policy.PIPEMAX:
            batching["batching"] = self.batching.value
            if self.batching is Batching.MIXED:
                batching["mixed_step_tokens"] = self.chunk_tokens
        return {
            "policy": self.policy.value,
            **batching,
            "max_num_batched_tokens": self.chunk_tokens,
            "max_num_seqs": self.max_num_seqs,
        }


def engine_part(config: EngineConfig, node: NodeSpec, model: ModelSpec) -> EnginePart:
    """Return the part of a node on which the config's engine runs.

    ``ValueError`` for what a rehearsal cannot do, and if the engine does not fit the node.
    """
    _check_rehearsable(config, model)
    tensor = config.tensor_degree
    pipeline = config.pipeline_parallel_size or max(1, node.num_gpus // tensor)
    num_gpus = pipeline * tensor
    if num_gpus > node.num_gpus:
        raise ValueError(
            f"the engine config has {pipeline} stages of {tensor} GPUs, and {node.name} has {node.num_gpus} GPUs"
        )
    given = config.model_fields_set
    if "gpu_memory_utilization" in given:
        node = replace(node, gpu_memory_fraction=config.gpu_memory_utilization)
    if config.host_kv_gib is not None:
        host_bytes = config.host_kv_gib * GIB * node.num_gpus
        if host_bytes > node.host_memory_bytes:
            raise ValueError(
                f"host_kv_gib {config.host_kv_gib:g} for each of {node.num_gpus} GPUs is more than the "
                f"{node.host_memory_bytes / GIB:.0f} GiB of memory of {node.name}"
            )
        node = replace(node, host_kv_fraction=host_bytes / node.host_memory_bytes)
    return EnginePart(
        node=node.part(num_gpus),
        num_engines=node.num_gpus // num_gpus,
        parallelism=Parallelism(pipeline=pipeline, tensor=tensor),
    )


def rows_that_fill(part: EnginePart, model: ModelSpec, workload: Workload) -> int:
    """Return how many rows to rehearse: as many as fill the GPUs' KV three times, between 200 and 2,000."""
    capacity = kv_capacity(part.node, model, part.parallelism, block_tokens=BLOCK_TOKENS, frees_windows=True)
    rows = _POOL_FILLS * capacity.gpu_rows(workload.tokens_per_row)
    return int(min(max(rows, _FEWEST_ROWS), _MOST_ROWS))


def _check_rehearsable(config: EngineConfig, model: ModelSpec) -> None:
    faults = []
    if config.block_size not in (None, BLOCK_TOKENS):
        faults.append(f"block_size {config.block_size}: the virtual node has blocks of {BLOCK_TOKENS} tokens")
    if config.kv_offload is not KvOffload.AFTER_STEP:
        faults.append(f"kv_offload {config.kv_offload.value}: copies are rehearsed after each step only")
    if config.quantization is not None:
        faults.append(
            f"quantization {config.quantization}: step times follow the model profile's bytes_per_value, so leave it "
            "out and give a profile with other bytes"
        )
    if config.dtype != "auto" and _BYTES_OF_DTYPE.get(config.dtype) != model.bytes_per_value:
        faults.append(f"dtype {config.dtype}: the model profile has values of {model.bytes_per_value} bytes")
    if config.enforce_eager:
        faults.append("enforce_eager true: the node profile's step overhead is that of CUDA graphs")
    unknown = {
        name: value
        for name, value in config.vllm_arguments.items()
        if _HARMLESS_VLLM_ARGUMENTS.get(name) != value
    }
    if unknown:
        faults.append(f"vllm: {', '.join(sorted(unknown))}: a rehearsal takes no further arguments of vLLM")
    if faults:
        raise ValueError("a rehearsal cannot do what the engine config says: " + "; ".join(faults))


def frees_windows(config: EngineConfig, part: EnginePart, model: ModelSpec, workload: Workload) -> bool:
    """Return whether PipeMax frees what has left the windows of the model's layers, as an engine on the node would.

    ``ValueError`` if the config shares no prefixes, of which the workload has some: the virtual node shares them.
    """
    if config.enable_prefix_caching:
        return False
    if workload.shared_prefix_tokens:
        raise ValueError(
            f"enable_prefix_caching false: the rows share {workload.shared_prefix_tokens} tokens, whose KV a virtual "
            "node keeps; leave it out"
        )
    return freeing_windows_pays(
        part.node,
        model,
        part.parallelism,
        block_tokens=BLOCK_TOKENS,
        tokens_per_row=workload.tokens_per_row,
    )


def unused_fields(config: EngineConfig) -> list[str]:
    """Return the config's fields that are set and have no part in a rehearsal."""
    names = ("calibration", "calibrate_at_start_s", "check_at_start", "cpu_kv_gib", "row_lengths")
    return [name for name in names if name in config.model_fields_set]


def candidates(config: EngineConfig, part: EnginePart) -> list[Candidate]:
    """Return all settings that the config allows: what it sets is kept, what it leaves open is varied.

    PipeMax is left out where ``policy: auto`` never takes it: with one pipeline stage.
    """
    found: list[Candidate] = []
    if config.policy is not Policy.PIPEMAX:
        found += _of_family(config, Policy.VLLM, Batching.SEPARATED, STOCK_STEP_TOKENS)
    can_gain = part.parallelism.pipeline > 1
    if config.policy is Policy.PIPEMAX or (config.policy is Policy.AUTO and can_gain):
        is_open = config.batching is BatchingChoice.AUTO
        for batching in [*Batching] if is_open else [config.batching.at_start]:
            sizes: Sequence[int] = PREFILL_STEP_TOKENS
            if batching is Batching.MIXED:
                sizes = (config.mixed_step_tokens,) if config.mixed_step_tokens else MIXED_TOKENS_TO_TRY
            found += _of_family(config, Policy.PIPEMAX, batching, sizes)
    return found


def _of_family(
    config: EngineConfig, policy: Policy, batching: Batching, sizes: Sequence[int]
) -> list[Candidate]:
    if config.max_num_batched_tokens is not None:
        sizes = (config.max_num_batched_tokens,)
    # vLLM refuses more requests than a step has tokens.
    most = config.max_num_seqs or MAX_NUM_SEQS
    return [
        Candidate(policy=policy, batching=batching, chunk_tokens=size, max_num_seqs=min(most, size))
        for size in sizes
    ]


def simulate_candidate(
    candidate: Candidate, part: EnginePart, scenario: Scenario, *, frees_windows: bool = False
) -> SimulationResult:
    """Simulate one engine; ``frees_windows`` under PipeMax. ``ValueError`` if the model does not fit."""
    if candidate.policy is Policy.PIPEMAX:
        controller: dict[str, Any] = {
            "prefill_chunk_tokens": candidate.chunk_tokens,
            "max_num_seqs": candidate.max_num_seqs,
        }
        if candidate.batching is Batching.MIXED:
            controller |= mixed_batching(candidate.chunk_tokens)
        options = PipeMaxOptions(
            tensor=part.parallelism.tensor, controller=controller, frees_windows=frees_windows
        )
        return PipeMaxSystem(scenario, options).simulate()
    policy = vllm_032(
        candidate.chunk_tokens,
        tensor=part.parallelism.tensor,
        max_num_seqs=candidate.max_num_seqs,
        keeps_preempted=True,
    )
    return ContinuousBatching(scenario, policy).simulate()


def best_of_each_family(simulated: Sequence[tuple[Candidate, float]]) -> list[tuple[Candidate, float]]:
    """Return the fastest of each policy and batching, fastest first, by its simulated tokens/s."""
    best: dict[str, tuple[Candidate, float]] = {}
    for candidate, rate in simulated:
        if candidate.name not in best or rate > best[candidate.name][1]:
            best[candidate.name] = (candidate, rate)
    return sorted(best.values(), key=lambda entry: -entry[1])
