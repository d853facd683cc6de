"""The model that a plan is made for: a profile that ships, a profile of the caller's, or a checkpoint's config.json."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pipemax.domain.specs import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedModel:
    """A model's shapes, and whether PipeMax runs it."""

    shapes: "ModelSpec"
    refusal: str | None
    """Why PipeMax refuses it, as the end of "it …"; ``None`` if it does not, or if only a profile is known."""
    directory: Path | None
    """Where the config.json is, and perhaps a tokenizer."""


def planned_model(model: str) -> PlannedModel:
    """Return the model of a name, a path or ``org/name``. ``ValueError`` says what is not known, or how to get it."""
    from pipemax.checkpoint.config_json import config_json_path, load_config_json
    from pipemax.checkpoint.model_kinds import refusal_under_pipemax
    from pipemax.checkpoint.model_shapes import model_shapes
    from pipemax.presets import load_model, preset_names

    if model in preset_names("models") or model.endswith((".yaml", ".yml")):
        return PlannedModel(shapes=load_model(model), refusal=None, directory=None)
    if "/" not in model and not Path(model).exists():
        raise ValueError(
            f"no model {model!r}: give one of the profiles {', '.join(preset_names('models'))}, a .yaml file, a "
            "checkpoint's directory, its config.json, or org/name"
        )
    path = config_json_path(model)
    name = path.stem if path.stem != "config" else model if "/snapshots/" in str(path) else path.parent.name
    config = load_config_json(path)
    return PlannedModel(
        shapes=model_shapes(name or model, config, dtype="auto"),
        refusal=refusal_under_pipemax(config),
        directory=path.parent,
    )
