"""The engine config that a job gives: its model found, its paths absolute, and the options of its engine.

``models:/NAME/VERSION`` and ``models:/NAME@ALIAS`` name a model of MLflow's registry, or of Unity Catalog. Its files
are copied once into a directory that all executors must see; the model is then an ordinary checkpoint directory, and
its content is in the spec. MLflow is imported only where such a name is given.
"""

import os
import re
import shutil
import tempfile
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipemax.wire import GenerationSpec, PreflightReply
from pipemax_spark.errors import JobError, cause_of
from pipemax_spark.executor.client import EngineOptions
from pipemax_spark.executor.questions import Question
from pipemax_spark.request.argument_types import checked_value
from pipemax_spark.spark.profiles import discovery_script_of
from pipemax_spark.spark.session import is_connect
from pipemax_spark.spark.slots import slots_of

if TYPE_CHECKING:
    from pyspark.resource import ResourceProfile
    from pyspark.sql import SparkSession

DIRECTORY_VARIABLE = "PIPEMAX_MODEL_DIR"
"""Directory of the copies; default: ``~/.cache/pipemax/models``. On a cluster, give one that all machines see."""
_NAME = re.compile(r"models:/(?P<name>[^/@]+)(?:/(?P<version>\d+)|@(?P<alias>[^/@]+))")
_CHECKPOINT_PLACES = ("", "model", "artifacts/*", "data/model")
"""Where a checkpoint lies within a registered model: by itself, or as MLflow's flavours keep it."""
_TOKENIZER_PLACE = "components/tokenizer"


def engine_config(
    engine: Mapping[str, Any] | None,
    model: str | None,
    *,
    json_whitespace: str | None = None,
    unpinned_model: bool | None = None,
) -> dict[str, Any]:
    """Return the engine config; ``model`` and the other settings replace its own.

    A model of MLflow's registry becomes the directory of its files. Raise ``JobError`` if no model is named, if the
    registry does not have it, or if a model that is loaded here is to be unpinned.
    """
    settings = {"model": model, "json_whitespace": json_whitespace, "unpinned_model": unpinned_model or None}
    config = {**(engine or {}), **{name: value for name, value in settings.items() if value is not None}}
    if not config.get("model"):
        raise JobError("no model is named; give model (--model), or an engine config with a line 'model: …'")
    config["model"] = checked_value("model", config["model"], str)
    if "endpoint" in config:  # the model's name is the server's
        ca_file = config.get("ca_file")
        return config if ca_file is None else {**config, "ca_file": str(Path(str(ca_file)).absolute())}
    if unpinned_model:
        raise JobError(
            "unpinned-model is for a model that an endpoint serves (a line 'endpoint: …' in the engine config); leave "
            "it out: the spec holds the content of a model that is loaded here"
        )
    if config["model"].startswith("models:/"):
        files = _registered_model(config["model"])
        config["model"] = files.model
        if files.tokenizer is not None:
            config.setdefault("tokenizer", files.tokenizer)
    return _with_absolute_paths(config)


def _with_absolute_paths(engine: dict[str, Any]) -> dict[str, Any]:
    """Make local paths absolute, because servers run in a directory of their own."""
    paths: dict[str, Any] = {
        name: _absolute_if_here(engine[name])
        for name in ("model", "tokenizer")
        if isinstance(engine.get(name), str)
    }
    if isinstance(adapters := engine.get("lora"), Mapping):
        paths["lora"] = {name: _absolute_if_here(directory) for name, directory in adapters.items()}
    return {**engine, **paths}


def _absolute_if_here(name: Any) -> Any:
    """Make a directory's path absolute. Other names are the hub's; where this user may not look, preflight says so."""
    try:
        return str(Path(name).absolute()) if Path(str(name)).is_dir() else name
    except OSError:
        return name


def engine_options(
    spark: "SparkSession",
    engine: Mapping[str, Any],
    generation: GenerationSpec,
    *,
    questions: Sequence[Question] = (),
    engine_python: str | None,
    log_dir: str | None,
    run_id: str | None = None,
    reuses_results: bool = True,
    profile: "ResourceProfile | None" = None,
) -> EngineOptions:
    """Return the engine options of the run ``run_id``, or of a new run if that is None."""
    is_endpoint = "endpoint" in engine
    return EngineOptions(
        engine=_with_executors(spark, engine) if is_endpoint else engine,
        generation=generation,
        questions=tuple(question.generation for question in questions),
        job_id=run_id or uuid.uuid4().hex,
        engine_python=engine_python,
        gpu_discovery_script=None if is_endpoint else discovery_script_of(spark, profile),
        log_dir=log_dir,
        reuses_results=reuses_results,
    )


def _with_executors(spark: "SparkSession", engine: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return an endpoint's config with the number of executors, over which its limits are divided.

    Spark Connect does not tell it; there the config may.
    """
    if "executors" in engine or is_connect(spark):
        return engine
    return {**engine, "executors": slots_of(spark).executors}


def with_engine_settings(options: EngineOptions, reply: PreflightReply) -> EngineOptions:
    """Return the options with the settings of the engine that the check has found necessary."""
    return replace(options, engine={**options.engine, **reply.engine_settings})


@dataclass(frozen=True, slots=True, kw_only=True)
class _ModelFiles:
    """A checkpoint directory, and the tokenizer's if it is another one."""

    model: str
    tokenizer: str | None = None


def _registered_model(model: str) -> _ModelFiles:
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


def _checkpoint(place: Path, model: str) -> _ModelFiles:
    for where in _CHECKPOINT_PLACES:
        for directory in sorted(place.glob(where)) if where else [place]:
            if (directory / "config.json").is_file():
                tokenizer = place / _TOKENIZER_PLACE
                return _ModelFiles(
                    model=str(directory), tokenizer=str(tokenizer) if tokenizer.is_dir() else None
                )
    raise JobError(f"model {model!r} has no Hugging Face checkpoint: there is no config.json in {place}")
