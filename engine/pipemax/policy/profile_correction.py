"""Corrects a node's profile by what engines measured on this machine with this model, in whatever layout.

A calibration has the step times of one layout. A layout that was never run has only the profile. Their ratio in the
layout that was measured, by kind of step, says how far the profile is off on this machine: the profile's rates are
scaled until its decode steps, and its steps of prompts, take as long as the measured ones on average. All layouts are
then simulated over the corrected profile, the measured ones too: figures of two sources would favor one of them.

Rates of links are the driver's still: a calibration may not have measured them. Pure but for reading the files.
"""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from pipemax.control.times.calibration import Calibration, load_calibration
from pipemax.domain.specs import ModelSpec, NodeSpec
from pipemax.node.kept_files import CALIBRATIONS, kept_directory, kept_name
from pipemax.policy.layouts import Layout, possible_layouts
from pipemax.sim.stage_times import StageTimes, StepWork, prompt_pairs

log = logging.getLogger(__name__)

_DECODES = tuple((size, context) for size in (1, 8, 32, 64, 128, 256) for context in (64, 512, 2048))
"""Requests of a step, and the tokens that each attends to."""
_PROMPTS = (256, 512, 1024, 2048, 4096)
"""Tokens of a step that is one prompt."""
_ROUNDS = 30
_MOST = 20.0
"""A profile that is off by more describes another machine."""
_SAME_BYTES = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """A corrected profile."""

    node: NodeSpec
    decode: float
    """Measured seconds of a decode step, as a multiple of the profile's."""
    prompt: float
    """The same of a step of prompts."""
    layouts: tuple[Layout, ...]
    """Those that were measured."""

    @property
    def reason(self) -> str:
        """One clause."""
        measured = ", ".join(
            f"tp {layout.tensor_parallel} × pp {layout.pipeline_parallel}" for layout in self.layouts
        )
        return (
            f"corrected by the calibration of {measured} (decode steps take {self.decode:.2f}× the profile's time, "
            f"prompts {self.prompt:.2f}×)"
        )


def kept_calibrations(environ: Mapping[str, str], model: str, device: str) -> list[Calibration]:
    """Return what engines with this model measured on this kind of device, the newest first."""
    directory, model_name = kept_directory(environ, CALIBRATIONS), model.rstrip("/").rpartition("/")[2]
    try:
        files = sorted(directory.glob(f"{kept_name(model)}--*.yaml"), key=lambda file: -file.stat().st_mtime)
    except OSError as error:
        log.warning("calibrations in %s cannot be read: %s", directory, error)
        return []
    calibrations = []
    for file in files:
        try:
            calibration = load_calibration(file)
        except (OSError, ValueError) as error:
            log.warning("%s is left out: %s", file, error)
            continue
        if calibration.device == device and calibration.model == model_name:
            calibrations.append(calibration)
    return calibrations


def corrected_profile(
    node: NodeSpec, model: ModelSpec, calibrations: Sequence[Calibration]
) -> Correction | None:
    """Return the node with the rates that the calibrations show, the first one of each layout; None without any."""
    measured: dict[Layout, Calibration] = {}
    for calibration in calibrations:
        if (layout := measured_layout(node, model, calibration)) is not None:
            measured.setdefault(layout, calibration)
    if not measured:
        return None
    # Of the memory's rate, and with it of all that is no arithmetic; and of the arithmetic.
    memory, arithmetic = 1.0, 1.0
    for _ in range(_ROUNDS):
        decode, prompt = _ratios(_scaled(node, memory, arithmetic), model, measured)
        memory, arithmetic = memory * decode, arithmetic * prompt
    if not all(1 / _MOST < scale < _MOST for scale in (memory, arithmetic)):
        log.warning("calibrations of %s are left out: they are of another machine", model.name)
        return None
    decode, prompt = _ratios(node, model, measured)
    return Correction(
        node=_scaled(node, memory, arithmetic), decode=decode, prompt=prompt, layouts=tuple(measured)
    )


def measured_layout(node: NodeSpec, model: ModelSpec, calibration: Calibration) -> Layout | None:
    """Return the layout that a calibration was measured in; None if it is of another model, KV type or node."""
    tensor, pipeline = calibration.tensor_parallel, len(calibration.stages)
    layouts = [
        layout
        for layout in possible_layouts(node)
        if (layout.tensor_parallel, layout.pipeline_parallel) == (tensor, pipeline)
    ]
    own_bytes = model.kv_bytes_per_token / model.kv_shards(tensor)
    their_bytes = sum(stage.kv_bytes_per_token for stage in calibration.stages)
    return layouts[0] if layouts and abs(own_bytes / their_bytes - 1) < _SAME_BYTES else None


def _scaled(node: NodeSpec, memory: float, arithmetic: float) -> NodeSpec:
    """Return the node with times of memory, launches and collectives, and of arithmetic, multiplied by these."""
    gpu, all_reduce = node.gpu, node.all_reduce
    return replace(
        node,
        gpu=replace(
            gpu,
            hbm_bytes_per_s=gpu.hbm_bytes_per_s / memory,
            step_overhead_s=gpu.step_overhead_s * memory,
            flops_per_s=gpu.flops_per_s / arithmetic,
            fp8_flops_per_s=gpu.fp8_flops_per_s and gpu.fp8_flops_per_s / arithmetic,
            fp4_flops_per_s=gpu.fp4_flops_per_s and gpu.fp4_flops_per_s / arithmetic,
        ),
        all_reduce=replace(
            all_reduce,
            bus_bytes_per_s=all_reduce.bus_bytes_per_s / memory,
            latency_s=all_reduce.latency_s * memory,
        ),
    )


def _ratios(node: NodeSpec, model: ModelSpec, measured: Mapping[Layout, Calibration]) -> tuple[float, float]:
    """Return measured seconds over the node's, of decode steps and of prompts: geometric means."""
    decode, prompt = list[float](), list[float]()
    for layout, calibration in measured.items():
        times = StageTimes(node.part(layout.gpus_per_engine), model, layout.parallelism)
        stages = calibration.stages
        for size, context in _DECODES:
            work = StepWork(decode_requests=size, decode_context_tokens=size * context)
            seconds = sum(stage.decode_time.seconds(size, size * context) for stage in stages)
            decode.append(math.log(seconds / sum(times.stage_s(work))))
        for tokens in _PROMPTS:
            pairs = prompt_pairs(0, tokens)
            work = StepWork(prefill_tokens=tokens, prefill_pairs=pairs, prefill_outputs=1)
            seconds = sum(stage.prefill_time.seconds(tokens, round(pairs)) for stage in stages)
            prompt.append(math.log(seconds / sum(times.stage_s(work))))
    return math.exp(fmean(decode)), math.exp(fmean(prompt))
