"""PipeMax's options in the simulator, and its controller's config there, with the machine's step times and rates."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pipemax.control.controller_config import ControllerConfig, StageConfig, usual_num_batches
from pipemax.control.times.estimator import ProfileRow, fit_step_time
from pipemax.domain.plan import Batching
from pipemax.domain.specs import NodeSpec
from pipemax.domain.units import ceil_div
from pipemax.sim.machine import BLOCK_TOKENS, Machine
from pipemax.sim.measured_engine import MeasuredEngine
from pipemax.sim.stage_times import StageTimes, StepWork, prompt_pairs
from pipemax.sim.workloads import Workload

_TILES = (1, 8, 16, 17, 32, 64, 128, 129, 192, 256, 257, 320, 384, 385, 448, 512, 513, 640, 768, 1024, 2048)
_CONTEXTS = (64, 512, 2048)


@dataclass(frozen=True, slots=True, kw_only=True)
class PipeMaxOptions:
    """Options of a simulated PipeMax. The defaults are PipeMax; other values make a sensitivity."""

    name: str = "pipemax"
    estimator_bias: float = 0.0
    """0.1 makes the controller see every step as 10 % longer than it is, in the profile and online."""
    controller: Mapping[str, Any] = field(default_factory=dict)
    """Fields of ``ControllerConfig`` that differ from their defaults."""
    num_batches: int | None = None
    """n of the paper; None takes as many as an engine has that schedules asynchronously: one for each of four stages
    and more."""
    tensor: int = 1
    """GPUs that share each stage, each with a host pool and copies of its own."""
    frees_windows: bool = False
    """KV that has left sliding windows is freed, and prefixes are not shared. New tokens are stored whole."""


def mixed_batching(step_tokens: int) -> dict[str, Any]:
    """Return the options' ``controller`` for mixed batching with steps of at most this many tokens."""
    return {"batching": Batching.MIXED, "mixed_step_tokens": step_tokens}


def controller_config(
    machine: Machine, workload: Workload, options: PipeMaxOptions, pieces_of_layers: Callable[[int], int]
) -> ControllerConfig:
    """Return the controller's config on a machine.

    Of the outputs, the controller is told only the mean length, as a sample of the table would tell it.
    """
    capacity = machine.capacity
    if machine.measured is not None:
        return replace(_measured_config(machine.measured), **options.controller)
    assert isinstance(machine.times, StageTimes), machine.times
    num_stages = len(machine.times.layers)
    config = ControllerConfig(
        num_batches=options.num_batches or usual_num_batches(num_stages, num_stages + 1),
        stages=stage_configs(
            machine.node,
            machine.times,
            options,
            room_layers=machine.room_layers,
            block_tokens=capacity.block_tokens,
            pieces_of_layers=pieces_of_layers,
        ),
        gpu_blocks=capacity.gpu_blocks,
        host_blocks=capacity.host_blocks,
        block_tokens=capacity.block_tokens,
        kv_groups=capacity.groups,
        prefill_chunk_tokens=machine.prefill_step_tokens,
        initial_output_tokens=workload.typical_output_tokens,
        max_num_seqs=4096,
        max_resident_requests=65536,
    )
    return replace(config, **options.controller)


def _pieces_of_waves(pieces_of_layers: Callable[[int], int], wave_groups: int | None) -> Callable[[int], int]:
    """Return in how many pieces a block of so many layers is copied: in a wave, group of layers by group of layers."""
    if wave_groups is None:
        return pieces_of_layers
    return lambda num_layers: wave_groups * pieces_of_layers(ceil_div(num_layers, wave_groups))


def _measured_config(engine: MeasuredEngine) -> ControllerConfig:
    """Return the config that the engine's own scheduler makes."""
    return ControllerConfig(
        num_batches=engine.num_batches,
        stages=engine.stages,
        gpu_blocks=engine.capacity.gpu_blocks,
        host_blocks=engine.capacity.host_blocks,
        block_tokens=engine.capacity.block_tokens,
        kv_groups=engine.capacity.groups,
        prefill_chunk_tokens=engine.max_batched_tokens,
        wave_groups=engine.wave_groups,
        max_num_seqs=engine.max_num_seqs,
        max_resident_requests=65536,
    )


def stage_configs(
    node: NodeSpec,
    times: StageTimes,
    options: PipeMaxOptions,
    *,
    room_layers: Sequence[int] | None = None,
    block_tokens: int = BLOCK_TOKENS,
    pieces_of_layers: Callable[[int], int] = lambda num_layers: 1,
    most_step_tokens: int = _TILES[-1],
) -> tuple[StageConfig, ...]:
    """Return each stage's config, with step times fitted to a profile of the simulated stage.

    ``room_layers``: for how many layers a block has room, where that is not all of a stage's. ``pieces_of_layers``: in
    how many contiguous pieces a block of so many layers lies; waves copy each group of layers by itself.
    The profile has steps of up to ``most_step_tokens``, as a calibration has that of an engine with this limit. Bytes
    and bandwidth are those of one of its GPUs, as an engine's workers report them.
    """
    together = min(node.root_bytes_per_s / node.gpus_per_root, node.host_dram_bytes_per_s / node.num_gpus)
    pieces_of_layers = _pieces_of_waves(pieces_of_layers, options.controller.get("wave_groups"))
    configs: list[StageConfig] = []
    layers = times.layers
    rooms = room_layers or layers
    for stage, num_layers in enumerate(layers):
        is_equal = num_layers == layers[stage - 1] and rooms[stage] == rooms[stage - 1]
        if 0 < stage < len(layers) - 1 and is_equal:
            configs.append(configs[-1])  # equal stages, equal profiles
            continue
        kv_bytes = round(times.kv_bytes_per_token(stage) * rooms[stage] / num_layers)
        piece_bytes = block_tokens * kv_bytes / pieces_of_layers(num_layers)
        bandwidth = min(node.link.effective_host_to_gpu_bytes_per_s(piece_bytes), together)
        decode, prefill = _profile(times, stage, options.estimator_bias, most_step_tokens)
        configs.append(
            StageConfig(
                kv_bytes_per_token=kv_bytes,
                h2d_bytes_per_s=bandwidth,
                decode_time=fit_step_time(decode),
                prefill_time=fit_step_time(prefill),
                mixed_scales=(node.gpu.mixed_cost,),
            )
        )
    return tuple(configs)


def _profile(
    times: StageTimes, stage: int, bias: float, most_step_tokens: int
) -> tuple[list[ProfileRow], list[ProfileRow]]:
    """Return the decode and the prefill rows of one stage, with times longer by the share ``bias``."""
    decode, prefill = [], []
    for size in (*_TILES, *range(2 * _TILES[-1], most_step_tokens + 1, _TILES[-1])):
        for context in _CONTEXTS:
            work = StepWork(decode_requests=size, decode_context_tokens=size * context)
            seconds = times.stage_s(work)[stage] * (1 + bias)
            decode.append(ProfileRow(size=size, kv_tokens=size * context, seconds=seconds))
            pairs = int(prompt_pairs(context, size))
            work = StepWork(prefill_tokens=size, prefill_pairs=pairs, prefill_outputs=1)
            seconds = times.stage_s(work)[stage] * (1 + bias)
            prefill.append(ProfileRow(size=size, kv_tokens=pairs, seconds=seconds))
    return decode, prefill
