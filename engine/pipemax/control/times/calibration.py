"""Calibrations as YAML: each stage's coefficients for one device and model, and how they were measured.

Each calibration is a file ``DEVICE--MODEL.yaml``, under ``conf/calibration/`` or among the presets that ship. Unknown
keys are rejected, so that a misspelt one cannot silently fall back to a default.
"""

from dataclasses import dataclass
from pathlib import Path

import yaml

from pipemax.control.controller_config import StageConfig
from pipemax.domain.plain_values import decode, encode

GOOD_SHARE = 0.8
"""Of the decode steps, which a good calibration predicts within 5 %."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """What was measured of an engine's steps and copies, stage by stage."""

    device: str
    model: str
    measured: str
    """Date, command and spread: what a reader needs to trust or repeat it."""
    round_trip_s: float = 0.0
    """From the end of a batch's step on the last stage to its next step on the first: outputs, scheduling, messages."""
    tensor_parallel: int = 1
    """GPUs that share each stage, whose bytes and rates are those of one of them."""
    within_5_percent: float | None = None
    """The share of the measured decode steps that the fit predicts within 5 %; older calibrations do not say it."""
    stages: tuple[StageConfig, ...]

    @property
    def is_guess(self) -> bool:
        """Return whether the fit misses so many of its own steps that it is worth no more than a guess."""
        return self.within_5_percent is not None and self.within_5_percent < GOOD_SHARE

    def __post_init__(self) -> None:
        if not (self.device and self.model and self.stages):
            raise ValueError("a calibration names its device and its model, and has at least one stage")
        if self.round_trip_s < 0:
            raise ValueError(f"round_trip_s must not be negative: {self.round_trip_s}")
        if self.tensor_parallel < 1:
            raise ValueError(f"a stage has at least one GPU, not {self.tensor_parallel}")


def load_calibration(path: Path) -> Calibration:
    """Read a calibration. Raise ``ValueError`` with the file's name if the file is not one."""
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
        stages = values["stages"] if isinstance(values, dict) else ()
        for stage in stages:  # older calibrations have one scale of mixed steps, or none
            if "mixed_scale" in stage:
                stage["mixed_scales"] = [stage.pop("mixed_scale")]
        calibration: Calibration = decode(Calibration, values)
    except (KeyError, TypeError, ValueError, yaml.YAMLError) as error:
        raise ValueError(f"{path.name} is no calibration: {error}") from error
    return calibration


def save_calibration(path: Path, calibration: Calibration) -> None:
    """Write a calibration, replacing what the file held."""
    path.write_text(yaml.safe_dump(encode(calibration), sort_keys=False), encoding="utf-8")
