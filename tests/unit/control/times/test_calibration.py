"""Calibrations as YAML: saved, loaded, and refused where they are none."""

from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from pipemax.control.times.calibration import (
    Calibration,
    load_calibration,
    save_calibration,
)
from pipemax.domain.step_times import Segment, StepTimeModel
from tests.unit.control.fake_engine import stage

STAIRCASE = StepTimeModel(
    segments=(
        Segment(min_size=1, alpha_s=1e-5, delta_s=0.02),
        Segment(min_size=129, alpha_s=2e-5, delta_s=0.03),
    ),
    beta_s=3e-8,
)
CALIBRATION = Calibration(
    device="NVIDIA GeForce RTX 5090",
    model="meta-llama/Llama-2-70b-hf",
    measured="never: a test",
    stages=(stage(), replace(stage(), decode_time=STAIRCASE)),
    tensor_parallel=2,
)


def test_what_was_saved_is_loaded(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    save_calibration(path, CALIBRATION)
    assert load_calibration(path) == CALIBRATION


@pytest.mark.parametrize(
    "spoil",
    [
        lambda values: values.pop("measured"),
        lambda values: values.update(devise="x"),
        lambda values: values["stages"][0].pop("h2d_bytes_per_s"),
        lambda values: values["stages"][0]["decode_time"].update(gamma_s=1.0),
        lambda values: values["stages"][0]["decode_time"].update(segments=[]),
        lambda values: values["stages"][0].update(h2d_bytes_per_s=0),
        lambda values: values.update(stages=[]),
        lambda values: values.update(device=""),
    ],
)
def test_a_file_that_is_not_a_calibration_is_refused_by_name(tmp_path: Path, spoil) -> None:
    path = tmp_path / "c.yaml"
    save_calibration(path, CALIBRATION)
    values = yaml.safe_load(path.read_text())
    spoil(values)
    path.write_text(yaml.safe_dump(values))
    with pytest.raises(ValueError, match=r"c\.yaml is no calibration"):
        load_calibration(path)


@pytest.mark.parametrize("text", ["", "- a\n- b\n", "{", "device: [\n"])
def test_other_files_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"c\.yaml is no calibration"):
        load_calibration(path)


SHIPPED = sorted((Path(__file__).parents[4] / "conf" / "calibration").glob("*.yaml"))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_shipped_calibrations_load(path: Path) -> None:
    assert load_calibration(path).stages


def test_at_least_one_calibration_is_shipped() -> None:
    assert SHIPPED
