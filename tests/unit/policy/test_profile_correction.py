"""A node's profile, corrected by what engines measured on it."""

from dataclasses import replace
from pathlib import Path

import pytest

from pipemax.control.times.calibration import Calibration, save_calibration
from pipemax.domain.specs import NodeSpec, Parallelism
from pipemax.policy.layouts import Layout
from pipemax.policy.profile_correction import corrected_profile, kept_calibrations, measured_layout
from pipemax.sim.stage_times import StageTimes, StepWork, prompt_pairs
from pipemax.sim.systems.pipemax_config import PipeMaxOptions, stage_configs
from tests.unit.sim.machines import small_model, small_node

NODE = small_node(num_gpus=4, kv_gb=12.0)
DEVICE = "NVIDIA GeForce RTX 5090"


def real(node: NodeSpec, *, memory: float, arithmetic: float) -> NodeSpec:
    """Return a machine whose memory and arithmetic are this many times as slow as the profile's."""
    gpu = node.gpu
    return replace(
        node,
        gpu=replace(
            gpu,
            hbm_bytes_per_s=gpu.hbm_bytes_per_s / memory,
            step_overhead_s=gpu.step_overhead_s * memory,
            flops_per_s=gpu.flops_per_s / arithmetic,
        ),
    )


def measured_on(node: NodeSpec, *, tensor: int, pipeline: int) -> Calibration:
    """Return what an engine of this layout would measure on the node."""
    part = node.part(tensor * pipeline)
    times = StageTimes(part, small_model(), Parallelism(pipeline=pipeline, tensor=tensor))
    stages = stage_configs(part, times, PipeMaxOptions())
    return Calibration(
        device=DEVICE, model="small", measured="in a test", stages=stages, tensor_parallel=tensor
    )


def step_s(node: NodeSpec, work: StepWork, *, tensor: int, pipeline: int) -> float:
    return sum(StageTimes(node, small_model(), Parallelism(pipeline=pipeline, tensor=tensor)).stage_s(work))


@pytest.mark.parametrize("slow", [(1.0, 1.0), (1.4, 1.4), (1.6, 0.8)])
def test_steps_of_a_layout_that_was_not_measured_are_predicted(slow: tuple[float, float]) -> None:
    machine = real(NODE, memory=slow[0], arithmetic=slow[1])
    correction = corrected_profile(NODE, small_model(), [measured_on(machine, tensor=1, pipeline=4)])
    assert correction is not None
    decode = StepWork(decode_requests=64, decode_context_tokens=64 * 800)
    prompt = StepWork(prefill_tokens=2048, prefill_pairs=prompt_pairs(0, 2048), prefill_outputs=1)
    for work in (decode, prompt):
        truth = step_s(machine, work, tensor=1, pipeline=2)
        assert step_s(correction.node, work, tensor=1, pipeline=2) == pytest.approx(truth, rel=0.05)
    assert correction.layouts == (Layout(replicas=1, tensor_parallel=1, pipeline_parallel=4),)


def test_the_reason_names_the_layout_that_was_measured_and_the_ratios() -> None:
    machine = real(NODE, memory=1.5, arithmetic=1.5)
    correction = corrected_profile(NODE, small_model(), [measured_on(machine, tensor=1, pipeline=4)])
    assert correction is not None
    assert correction.reason == (
        "corrected by the calibration of tp 1 × pp 4 (decode steps take 1.50× the profile's time, prompts 1.50×)"
    )


def test_the_newest_calibration_of_a_layout_counts_and_several_layouts_count_alike() -> None:
    twice, same = real(NODE, memory=2.0, arithmetic=2.0), NODE
    newest_first = [
        measured_on(twice, tensor=1, pipeline=4),
        measured_on(same, tensor=1, pipeline=4),
        measured_on(same, tensor=1, pipeline=2),
    ]
    correction = corrected_profile(NODE, small_model(), newest_first)
    assert correction is not None
    assert [layout.pipeline_parallel for layout in correction.layouts] == [4, 2]
    assert correction.decode == pytest.approx(2.0**0.5, rel=0.02)


def test_a_calibration_of_another_layout_of_the_node_counts_and_one_of_another_kv_type_does_not() -> None:
    model, shared = small_model(), measured_on(NODE, tensor=2, pipeline=2)
    assert measured_layout(NODE, model, shared) == Layout(replicas=1, tensor_parallel=2, pipeline_parallel=2)
    fp8 = replace(model, kv_bytes_per_value=1)
    assert measured_layout(NODE, fp8, shared) is None
    assert corrected_profile(NODE, fp8, [shared]) is None
    assert measured_layout(small_node(num_gpus=2), model, shared) is None, "it has four GPUs"


def test_a_calibration_of_another_kind_of_machine_corrects_nothing() -> None:
    machine = real(NODE, memory=100.0, arithmetic=100.0)
    assert corrected_profile(NODE, small_model(), [measured_on(machine, tensor=1, pipeline=4)]) is None


def test_kept_calibrations_are_those_of_the_model_on_this_device(tmp_path: Path) -> None:
    directory = tmp_path / "pipemax" / "calibrations"
    directory.mkdir(parents=True)
    mine = measured_on(NODE, tensor=1, pipeline=4)
    save_calibration(directory / "small--1.yaml", mine)
    save_calibration(directory / "small--2.yaml", replace(mine, device="NVIDIA L20"))
    save_calibration(directory / "small--big--3.yaml", replace(mine, model="small--big"))
    (directory / "small--4.yaml").write_text("no calibration", encoding="utf-8")
    environ = {"XDG_CACHE_HOME": str(tmp_path)}
    assert kept_calibrations(environ, "/models/small", DEVICE) == [mine]
    assert kept_calibrations(environ, "/models/other", DEVICE) == []
    assert kept_calibrations({"XDG_CACHE_HOME": str(tmp_path / "none")}, "small", DEVICE) == []
