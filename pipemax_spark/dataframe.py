"""``annotate``: add a model's answers to a DataFrame as one more column, the struct ``annotation``.

Each task sends its rows to its executor's engine server and yields them as they complete, so the order of the rows
changes. This module builds the DataFrame; the code that runs in the tasks is in ``pipemax_spark.executor.task``.
"""

import json
import re
import uuid
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipemax.wire import GENERATE, GenerationSpec, PreflightReply, PreflightRequest
from pipemax_spark.annotating_stage import annotating_profile
from pipemax_spark.argument_types import checked_arguments, checked_value, checks_arguments
from pipemax_spark.arrow_types import arrow_type
from pipemax_spark.engine_check import recent_preflight
from pipemax_spark.errors import JobError, OnError
from pipemax_spark.executor.client import EngineOptions
from pipemax_spark.executor.questions import Question
from pipemax_spark.executor.requests import KEY_COLUMN
from pipemax_spark.executor.spool import dealt_directory, spool_fault
from pipemax_spark.executor.task import AnnotateTask, TaskPlan, annotation_type
from pipemax_spark.executor_call import call_on_executor
from pipemax_spark.helper_columns import map_rows, name_in
from pipemax_spark.image_settings import with_image_settings
from pipemax_spark.keywords import takes_fields
from pipemax_spark.limits import warn_of_limits
from pipemax_spark.model_source import is_registered, registered_model
from pipemax_spark.profiles import discovery_script_of
from pipemax_spark.prompts import PromptSource, find_field
from pipemax_spark.questions import read_questions
from pipemax_spark.request_columns import RequestColumns, without_request_columns
from pipemax_spark.slots import annotating_slots
from pipemax_spark.spec import AnnotationSpec
from pipemax_spark.structured_output import ResponseFormat, response_schema

if TYPE_CHECKING:
    from pyspark.resource import ResourceProfile
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

ANNOTATION = "annotation"
TemplateVariables = Mapping[str, Any] | str | None
"""The type of ``chat_template_kwargs`` that functions show."""


@checks_arguments
@takes_fields(
    GenerationSpec,
    stop=Sequence[str],
    response_format=ResponseFormat,
    choice=Sequence[str],
    chat_template_kwargs=TemplateVariables,
)
def annotate(
    df: "DataFrame",
    *,
    model: str | None = None,
    engine: Mapping[str, Any] | None = None,
    prompt_column: str | None = None,
    messages_column: str | None = None,
    template: str | None = None,
    image_column: str | None = None,
    allow_image_urls: Sequence[str] | str = (),
    query_column: str | None = None,
    ask: Mapping[str, Any] | None = None,
    overrides_column: str | None = None,
    on_error: str = "row",
    engine_python: str | None = None,
    log_dir: str | None = None,
    output_column: str = ANNOTATION,
    work_dir: str | None = None,
    resume: str | None = None,
    profile: "ResourceProfile | None" = None,
    **generation: Any,
) -> "DataFrame":
    """Return ``df`` with one more column, a struct that holds each row's answer or its error.

    The struct is {text, parsed (with a ``response_format``), finish_reason, prompt_tokens, completion_tokens, error
    {code, message}, spec_hash, run_id, completed_at}, and fields that ``logprobs``, ``n``, ``attempts`` and an engine
    with a ``reasoning_parser`` add; docs/guide/answers.md lists them.

    Give ``model``, or an ``engine`` config (a dict of its YAML) that names a model, and exactly one of
    ``prompt_column``, ``messages_column`` (array<struct<role, content>>) and ``template`` (such as
    ``"Summarise: {text}"``). ``image_column`` holds each row's image, which the model sees before the prompt (bytes, a
    path, a URL whose host is in ``allow_image_urls``), or an array of images. ``overrides_column`` is a struct with any
    of max_tokens, temperature, top_p, top_k, seed, stop and lora for its row. ``generation`` takes the fields of
    ``GenerationSpec``: system, max_tokens, temperature, top_p, top_k, stop, seed, lora and response_format: a JSON
    schema (dict or text), a schema in ``ai_query``'s envelope, the class of a Pydantic model, or a Spark type such as
    ``"STRUCT<label: STRING, score: DOUBLE>"``, which is then the type of ``parsed``;
    ``pipemax_spark.executor.response_format`` shows which type a JSON schema becomes. Instead of it, ``choice`` (a list
    of texts), ``regex`` or ``grammar`` constrain the text. ``profile`` is the
    ``ResourceProfile`` of executors with GPUs (``pipemax_spark.profiles.gpu_profile``), for a session whose own
    executors have none.

    ``task`` is ``generate``, or with a pooling model ``embed`` (the struct then has ``embedding``), ``classify``
    (``label`` and ``probabilities``) or ``score`` (``score``, of the prompt as an answer to ``query_column``);
    docs/guide/embed.md shows them.

    With ``ask``, several questions are asked about each row, and the engine reads the row's prompt once: a mapping from
    names to the texts that follow the prompt, or to dicts with ``template`` and fields of ``GenerationSpec``. Each name
    is a column like the struct above, and ``annotation`` has the tokens of all of them and the first error.

    With ``work_dir``, a directory on storage that all executors see, tasks save their completions there every 10 s, so
    a retried task, or a second action on this result, asks the engine only for the rest. With ``resume``, a name, a
    later application that makes the same call under the same name also asks only for the rest: rows are then assigned
    to partitions by their content (a shuffle), so they are found again whatever order they come in. Everything is kept
    in ``work_dir/pipemax/annotate``. This function deletes nothing there, because only the caller knows when the result
    is safe; delete the directory then.

    The result is lazy, like any transformation, and every action evaluates it again: write it to a table before you use
    it twice. A small Spark job runs at once: it checks model, engine and schema on an executor without starting an
    engine, and does not check them again within ten minutes. ``JobError``, a ``ValueError``, says what is wrong and
    what to do.
    """
    source = PromptSource(
        prompt_column=prompt_column,
        messages_column=messages_column,
        template=template,
        image_column=image_column,
        query_column=query_column,
    )
    has_images = source.has_images(df.schema)
    given = with_image_settings(
        engine_config(engine, model), has_images=has_images, allow_urls=allow_image_urls
    )
    config, spec_of_all = with_task(given, generation_spec(**generation))
    check_pooling(spec_of_all, source, ask=ask, overrides_column=overrides_column, image_column=image_column)
    questions = read_questions(ask or {}, spec_of_all)
    _check_askable(source, questions)
    columns = RequestColumns(source, overrides_column, questions=questions)
    _check_work_dir(df.sparkSession, work_dir, resume)
    policy = OnError.of(on_error)
    options = engine_options(
        df.sparkSession,
        config,
        spec_of_all,
        questions=questions,
        engine_python=engine_python,
        log_dir=log_dir,
        profile=profile,
    )
    # Find wrong columns before asking the executors.
    annotated_schema(df.schema, output_column, options.generation)
    requests = columns.add(df) if work_dir is None else columns.add_with_keys(df)
    spec, options = checked_spec(
        df.sparkSession,
        options,
        source,
        profile,
        questions=questions,
        time_zone=columns.time_zone(df),
        has_images=has_images,
    )
    plan = TaskPlan(
        options=options,
        spec_hash=spec.hash,
        run_id=options.job_id,
        output_column=output_column,
        questions=questions,
        on_error=policy,
    )
    if work_dir is not None:
        requests, plan = _with_spool(requests, plan, _spool_root(work_dir), resume)
    return warn_of_limits(annotate_requests(requests, plan, profile), df)


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


def checked_spec(
    spark: "SparkSession",
    options: EngineOptions,
    source: PromptSource | None,
    profile: "ResourceProfile | None" = None,
    *,
    questions: Sequence[Question] = (),
    time_zone: str | None = None,
    has_images: bool = False,
) -> tuple[AnnotationSpec, EngineOptions]:
    """Return the spec, and the options with the settings that the engine needs, once an executor has checked them.

    Raise ``JobError`` if engine or generation are not fine.

    A check that passed within the last ten minutes is not repeated.
    """
    request = PreflightRequest(
        engine=dict(options.engine),
        generation=options.generation,
        questions=options.questions,
        question_names=tuple(question.name for question in questions),
        has_images=has_images,
    )
    reply = recent_preflight(spark, request, options, profile=profile)
    for line in reply.warnings:
        warnings.warn(line, stacklevel=2)
    spec = AnnotationSpec.of(
        reply, source=source, generation=options.generation, questions=questions, time_zone=time_zone
    )
    return spec, with_engine_settings(options, reply)


def with_engine_settings(options: EngineOptions, reply: PreflightReply) -> EngineOptions:
    """Return the options with the settings of the engine that the check has found necessary."""
    return replace(options, engine={**options.engine, **reply.engine_settings})


def annotate_requests(
    requests: "DataFrame", plan: TaskPlan, profile: "ResourceProfile | None" = None
) -> "DataFrame":
    """Annotate rows that have their request columns (``RequestColumns.add``), without any check.

    Without a ``profile``, the stage gets the profile of ``annotating_profile``, if any.
    """
    profile = profile or annotating_profile(requests.sparkSession)
    key = name_in(KEY_COLUMN, requests.columns)
    own = [field for field in without_request_columns(requests).schema.fields if field.name != key]
    kept = type(requests.schema)(own)
    schema = annotated_schema(kept, plan.output_column, plan.options.generation, plan.questions)
    return map_rows(requests, AnnotateTask(plan), schema, profile=profile)


def annotated_schema(
    input_schema: "StructType",
    output_column: str,
    generation: GenerationSpec,
    questions: Sequence[Question] = (),
) -> "StructType":
    """Return the Spark schema of the result.

    With ``questions``, each has a column, and the result's column says what became of the row as a whole. Raise
    ``JobError`` if the input already has a column of such a name.
    """
    from pyspark.sql.pandas.types import from_arrow_type
    from pyspark.sql.types import StructField, StructType

    _check_carried(input_schema)
    kinds = {question.name: question.generation for question in questions}
    kinds[output_column] = GenerationSpec() if questions else generation
    added = []
    for name, own in kinds.items():
        if find_field(name, input_schema) is not None:
            raise JobError(
                f"the input already has a column {name!r}, which is the name of the result's column; rename or drop it "
                "first"
            )
        added.append(StructField(name, from_arrow_type(annotation_type(own), prefer_timestamp_ntz=False)))
    return StructType([*input_schema.fields, *added])


def _check_carried(schema: "StructType") -> None:
    """Raise ``JobError`` for columns that Spark cannot pass through a task in Python."""
    doubled = sorted(name for name, count in Counter(schema.names).items() if count > 1)
    if doubled:
        raise JobError(f"the input has several columns of the name {doubled[0]!r}; rename or drop them first")
    for field in schema.fields:
        if "interval" not in (kind := field.dataType.simpleString()):
            continue
        try:
            arrow_type(field.dataType)
        except JobError as error:
            raise JobError(
                f"column {field.name!r} is of type {kind}, which Spark cannot pass to Python; cast it to string, or "
                "drop it first"
            ) from error


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


def check_pooling(generation: GenerationSpec, source: PromptSource | None, **given: Any) -> None:
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
    for name, value in given.items():
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


def generation_spec(**given: Any) -> GenerationSpec:
    """Build the spec from what users give.

    ``JobError`` says what is wrong with the schema, ``TypeError`` names an unknown field.
    """
    values = checked_arguments(annotate, {name: value for name, value in given.items() if value is not None})
    return GenerationSpec(**generation_values(values))


def generation_values(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values as ``GenerationSpec`` has them.

    ``JobError`` says what is wrong with the response format or the choices.
    """
    values = {**given, "stop": tuple(given.get("stop", ()))}
    if isinstance(choice := given.get("choice", ()), str):
        raise JobError(f"choice is the text {choice!r}; give a list of texts")
    values["choice"] = tuple(choice)
    if isinstance(variables := given.get("chat_template_kwargs"), Mapping):
        values["chat_template_kwargs"] = json.dumps(variables)
    if (response_format := given.get("response_format")) is not None:
        values["response_format"] = response_schema(response_format)
    return values


def _check_askable(source: PromptSource, questions: Sequence[Question]) -> None:
    """Raise ``JobError`` if these questions cannot be asked about such prompts."""
    if questions and source.is_messages:
        raise JobError("ask needs a prompt-column or a template: a question is text that follows the prompt")


def _check_work_dir(spark: "SparkSession", work_dir: str | None, resume: str | None) -> None:
    if resume is not None and work_dir is None:
        raise JobError(f"resume={resume!r} names work that is kept in work_dir; give work_dir too")
    if resume is not None and not re.fullmatch(r"\w[\w.-]*", resume):
        raise JobError(f"resume={resume!r} must be a name of letters, digits, '_', '-' and '.'")
    if work_dir is None:
        return
    # Do not check this here: over Spark Connect this machine may lack the storage, and a local path means another one.
    if fault := call_on_executor(spark, partial(spool_fault, _spool_root(work_dir))):
        raise JobError(
            f"work_dir={work_dir!r} cannot be written to ({fault}); name one that all executors see"
        )


def _spool_root(work_dir: str) -> str:
    """Return a directory apart from those of the jobs, which are named after their tables' ids."""
    return f"{work_dir.rstrip('/')}/pipemax/annotate"


def _with_spool(
    keyed: "DataFrame", plan: TaskPlan, root: str, resume: str | None
) -> "tuple[DataFrame, TaskPlan]":
    """Prepare the rows, which have keys, and the plan so that tasks find what earlier tasks completed."""
    if resume is None:
        return keyed, replace(plan, spool=f"{root}/{plan.run_id}")
    spark = keyed.sparkSession
    wanted = max(int(spark.conf.get("spark.sql.shuffle.partitions") or 0), 2 * annotating_slots(spark))
    deal = partial(dealt_directory, f"{root}/{resume}-{plan.spec_hash}", wanted)
    directory, partitions = call_on_executor(spark, deal)
    return keyed.repartition(partitions, name_in(KEY_COLUMN, keyed.columns)), replace(plan, spool=directory)
