"""What users give for the generation, as the engine has it, and what it asks of the engine config."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from pipemax.wire import GENERATE, GenerationSpec
from pipemax_spark.errors import JobError
from pipemax_spark.request.formats import response_schema
from pipemax_spark.request.prompts import PromptSource

_LISTS = {field.name for field in fields(GenerationSpec) if field.default == ()}
"""Settings that are lists, which users give as lists of any kind."""


def with_task(engine: Mapping[str, Any], generation: GenerationSpec) -> tuple[dict[str, Any], GenerationSpec]:
    """Return both with the same task: the engine is started for the job's, and a job takes the engine config's.

    The generation has the thinking included where the engine splits it off, unless it says otherwise. Raise
    ``JobError`` if the two name different tasks.
    """
    named = engine.get("task") or GENERATE
    if generation.task == GENERATE:
        generation = replace(generation, task=str(named))
    elif named not in (GENERATE, generation.task):
        raise JobError(f"the task is {generation.task}, and the engine config's is {named}; name one task")
    if generation.task == GENERATE:
        return dict(engine), for_engine(generation, engine)
    return {**engine, "task": generation.task}, generation


def with_image_settings(
    engine: Mapping[str, Any], *, has_images: bool, allow_urls: Sequence[str] | str = ()
) -> dict[str, Any]:
    """Return the engine config for rows that have images, or for rows that have none.

    Raise ``JobError`` if the config names policy pipemax, which serves text only.
    """
    config = dict(engine)
    hosts = allow_urls.split(",") if isinstance(allow_urls, str) else allow_urls
    if not has_images:
        if allow_urls:
            raise JobError("allow-image-urls is given, and no column has images; give image-column too")
        return config
    match config.get("policy", "auto"):
        case "auto" if "endpoint" not in config:
            config["policy"] = "vllm"
        case "pipemax":
            raise JobError(
                "policy pipemax serves text only; for images set policy: vllm in the engine config, or leave it out"
            )
    if allow_urls:
        images = config.get("images") or {}
        config["images"] = {
            **images,
            "allow_urls": [*images.get("allow_urls", ()), *(host.strip() for host in hosts)],
        }
    return config


def check_pooling(generation: GenerationSpec, source: PromptSource | None, **others: Any) -> None:
    """Raise ``JobError`` if the prompts, or other things that are given, do not fit the task."""
    task = generation.task
    is_score, has_query = task == "score", source is not None and source.query_column is not None
    if has_query and not is_score:
        raise JobError(f"query-column is for the task score, and the task is {task}; leave query-column out")
    if not generation.is_pooling:
        return
    if source is not None and is_score and not has_query and not source.is_messages:
        raise JobError("the task score needs a query-column next to the prompt, which is the document")
    if source is not None and source.messages_column is not None and not is_score:
        raise JobError(
            f"the task {task} reads texts; give a prompt-column or a template, not a messages-column"
        )
    for name, value in others.items():
        if value:
            raise JobError(
                f"{name.replace('_', '-')} is for generation, and the task is {task}; leave it out"
            )
    try:
        generation.sampling()
    except (ValueError, TypeError) as error:
        raise JobError(str(error)) from error


def for_engine(generation: GenerationSpec, engine: Mapping[str, Any]) -> GenerationSpec:
    """Return the generation with the thinking included where the engine splits it off, unless it says otherwise."""
    if generation.include_reasoning is not None or engine.get("reasoning_parser") is None:
        return generation
    return replace(generation, include_reasoning=True)


def generation_values(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values as ``GenerationSpec`` has them.

    ``JobError`` says what is wrong with the response format or a list.
    """
    values = dict(settings)
    for name in _LISTS & values.keys():
        if isinstance(values[name], str):
            raise JobError(f"{name} is the text {values[name]!r}; give a list")
        values[name] = tuple(values[name])
    if isinstance(variables := settings.get("chat_template_kwargs"), Mapping):
        values["chat_template_kwargs"] = json.dumps(variables)
    if (response_format := settings.get("response_format")) is not None:
        values["response_format"] = response_schema(response_format)
    return values
