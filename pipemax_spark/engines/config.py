"""The engine config that a job gives: its model found, its paths absolute, and the options of its engine."""

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipemax.wire import GenerationSpec, PreflightReply
from pipemax_spark.engines.model_source import is_registered, registered_model
from pipemax_spark.errors import JobError
from pipemax_spark.executor.client import EngineOptions
from pipemax_spark.executor.questions import Question
from pipemax_spark.request.argument_types import checked_value
from pipemax_spark.spark.profiles import discovery_script_of

if TYPE_CHECKING:
    from pyspark.resource import ResourceProfile
    from pyspark.sql import SparkSession


def engine_config(engine: Mapping[str, Any] | None, model: str | None) -> dict[str, Any]:
    """Return the engine config; ``model`` replaces its own model.

    A model of MLflow's registry becomes the directory of its files. Raise ``JobError`` if no model is named, or if the
    registry does not have it.
    """
    config = {**(engine or {}), **({} if model is None else {"model": model})}
    if not config.get("model"):
        raise JobError("no model is named; give model (--model), or an engine config with a line 'model: …'")
    config["model"] = checked_value("model", config["model"], str)
    if is_registered(config["model"]):
        files = registered_model(config["model"])
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
    return EngineOptions(
        engine=engine,
        generation=generation,
        questions=tuple(question.generation for question in questions),
        job_id=run_id or uuid.uuid4().hex,
        engine_python=engine_python,
        gpu_discovery_script=discovery_script_of(spark, profile),
        log_dir=log_dir,
        reuses_results=reuses_results,
    )


def with_engine_settings(options: EngineOptions, reply: PreflightReply) -> EngineOptions:
    """Return the options with the settings of the engine that the check has found necessary."""
    return replace(options, engine={**options.engine, **reply.engine_settings})
