"""The calibrations in ``conf/calibration``, which ``lab/bench/simulated_calibration.py`` wrote."""

from pathlib import Path

import pytest

from lab.bench.simulated_calibration import calibration_path
from pipemax.control.times.calibration import load_calibration

SHIPPED = sorted((Path(__file__).parents[2] / "conf" / "calibration").glob("*.yaml"))


def test_files_are_named_by_device_and_model(tmp_path: Path) -> None:
    path = calibration_path(tmp_path, "NVIDIA GeForce RTX 5090", "meta-llama/Llama-2-70b-hf")
    assert path == tmp_path / "nvidia-geforce-rtx-5090--meta-llama-llama-2-70b-hf.yaml"


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_shipped_calibrations_are_found_by_their_names(path: Path) -> None:
    calibration = load_calibration(path)
    assert calibration_path(path.parent, calibration.device, calibration.model) == path
