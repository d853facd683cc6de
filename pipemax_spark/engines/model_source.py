"""Find a model of MLflow's registry, or of Unity Catalog, on storage that engines can load it from.

``models:/NAME/VERSION`` and ``models:/NAME@ALIAS`` name one. Its files are copied once into a directory that all
executors must see; the model is then an ordinary checkpoint directory, and its content is in the spec. MLflow is
imported only where such a name is given.
"""

import os
import re
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipemax_spark.errors import JobError, cause_of

DIRECTORY_VARIABLE = "PIPEMAX_MODEL_DIR"
"""Directory of the copies; default: ``~/.cache/pipemax/models``. On a cluster, give one that all machines see."""
_NAME = re.compile(r"models:/(?P<name>[^/@]+)(?:/(?P<version>\d+)|@(?P<alias>[^/@]+))")
_CHECKPOINT_PLACES = ("", "model", "artifacts/*", "data/model")
"""Where a checkpoint lies within a registered model: by itself, or as MLflow's flavours keep it."""
_TOKENIZER_PLACE = "components/tokenizer"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFiles:
    """A checkpoint directory, and the tokenizer's if it is another one."""

    model: str
    tokenizer: str | None = None


def is_registered(model: str) -> bool:
    """Tell whether the name is one of a registry."""
    return model.startswith("models:/")


def registered_model(model: str) -> ModelFiles:
    """Return where the registered model's files are, and copy them first if they are not there yet.

    Raise ``JobError`` if there is no such model or version, or if it is no checkpoint.
    """
    match = _NAME.fullmatch(model)
    if match is None:
        raise JobError(
            f"model is {model!r}; name a version or an alias: models:/NAME/3 or models:/NAME@champion"
        )
    try:
        from mlflow import MlflowClient
        from mlflow.artifacts import download_artifacts
    except ImportError as error:
        raise JobError(
            f"model {model!r} is in MLflow's registry, and mlflow is not installed here: {error}"
        ) from None
    name = match["name"]
    try:
        client: Any = MlflowClient()
        version = match["version"] or client.get_model_version_by_alias(name, match["alias"]).version
        place = _directory() / name / str(version)
        if not place.is_dir():
            _copy(
                lambda into: download_artifacts(artifact_uri=f"models:/{name}/{version}", dst_path=into),
                place,
            )
    except Exception as error:  # whatever a registry raises: the user has to know what was asked of it
        raise JobError(
            f"model {model!r} could not be read from MLflow's registry: {cause_of(error)}"
        ) from error
    return _checkpoint(place, model)


def _directory() -> Path:
    return Path(os.environ.get(DIRECTORY_VARIABLE) or Path.home() / ".cache" / "pipemax" / "models")


def _copy(download: Any, place: Path) -> None:
    """Download into a new directory, and give it its name when it is complete: a torn copy is never used."""
    place.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=place.parent, prefix=".part-") as part:
        downloaded = Path(download(part))
        try:
            shutil.move(str(downloaded), place)
        except OSError:
            if not place.is_dir():  # another driver was faster
                raise


def _checkpoint(place: Path, model: str) -> ModelFiles:
    for where in _CHECKPOINT_PLACES:
        for directory in sorted(place.glob(where)) if where else [place]:
            if (directory / "config.json").is_file():
                tokenizer = place / _TOKENIZER_PLACE
                return ModelFiles(
                    model=str(directory), tokenizer=str(tokenizer) if tokenizer.is_dir() else None
                )
    raise JobError(f"model {model!r} has no Hugging Face checkpoint: there is no config.json in {place}")
