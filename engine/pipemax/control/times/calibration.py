"""Calibrations as YAML: each stage's coefficients for one device and model, and how they were measured.

Each calibration is a file ``DEVICE--MODEL.yaml``, under ``conf/calibration/`` or among the presets that ship. Unknown
keys are rejected, so that a misspelt one cannot silently fall back to a default.
"""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import yaml

from pipemax.control.controller_config import StageConfig
from pipemax.domain.step_times import Segment, StepTimeModel

GOOD_SHARE = 0.8
"""Of the decode steps, which a good calibration predicts within 5 %."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """What was measured of an engine's steps and copies, stage by stage."""

    device: str
    model: str
    measured: str
    """Date, command and spread: what a reader needs to trust or repeat it."""
    stages: tuple[StageConfig, ...]
    round_trip_s: float = 0.0
    """From the end of a batch's step on the last stage to its next step on the first: outputs, scheduling, messages."""
    tensor_parallel: int = 1
    """GPUs that share each stage, whose bytes and rates are those of one of them."""
    within_5_percent: float | None = None
    """The share of the measured decode steps that the fit predicts within 5 %; older calibrations do not say it."""

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
        keywords = _exactly(Calibration, values)
        keywords["stages"] = tuple(_stage(stage) for stage in keywords["stages"])
        return Calibration(**keywords)
    except (KeyError, TypeError, ValueError, yaml.YAMLError) as error:
        raise ValueError(f"{path.name} is no calibration: {error}") from error


def save_calibration(path: Path, calibration: Calibration) -> None:
    """Write a calibration, replacing what the file held."""
    values = {
        "device": calibration.device,
        "model": calibration.model,
        "measured": calibration.measured,
        "round_trip_s": calibration.round_trip_s,
        "tensor_parallel": calibration.tensor_parallel,
        "within_5_percent": calibration.within_5_percent,
        "stages": [_encode_stage(stage) for stage in calibration.stages],
    }
    path.write_text(yaml.safe_dump(values, sort_keys=False), encoding="utf-8")


def _exactly(kind: type, values: object) -> dict[str, Any]:
    """Return the values. Raise ``ValueError`` unless they have exactly the fields of the dataclass ``kind``."""
    names = {field.name for field in fields(kind)}
    if not isinstance(values, dict):
        raise ValueError(f"{kind.__name__} has the keys {sorted(names)}, not the value {values!r}")
    if kind is StageConfig:  # older calibrations have one scale of mixed steps, or none
        values = {"mixed_scales": [values.get("mixed_scale", 1.0)], **values}
        values.pop("mixed_scale", None)
    if kind is Calibration:  # older ones do not say how many GPUs share a stage, nor how well they predict
        values = {"tensor_parallel": 1, "within_5_percent": None, **values}
    if names != values.keys():
        raise ValueError(f"{kind.__name__} has the keys {sorted(names)}, not {sorted(values)}")
    return dict(values)


def _stage(values: dict[str, Any]) -> StageConfig:
    keywords = _exactly(StageConfig, values)
    for name in ("decode_time", "prefill_time"):
        keywords[name] = _time_model(keywords[name])
    keywords["mixed_scales"] = tuple(keywords["mixed_scales"])
    return StageConfig(**keywords)


def _time_model(values: dict[str, Any]) -> StepTimeModel:
    keywords = _exactly(StepTimeModel, values)
    segments = tuple(Segment(**_exactly(Segment, segment)) for segment in keywords["segments"])
    return StepTimeModel(segments=segments, beta_s=keywords["beta_s"])


def _encode_stage(stage: StageConfig) -> dict[str, Any]:
    return {
        "kv_bytes_per_token": stage.kv_bytes_per_token,
        "h2d_bytes_per_s": stage.h2d_bytes_per_s,
        "decode_time": _encode_time_model(stage.decode_time),
        "prefill_time": _encode_time_model(stage.prefill_time),
        "mixed_scales": [*stage.mixed_scales],
    }


def _encode_time_model(model: StepTimeModel) -> dict[str, Any]:
    segments = [
        {"min_size": segment.min_size, "alpha_s": segment.alpha_s, "delta_s": segment.delta_s}
        for segment in model.segments
    ]
    return {"segments": segments, "beta_s": model.beta_s}
