"""``annotate``: add a model's answers to a DataFrame as one more column, the struct ``annotation``.

Each task sends its rows to its executor's engine server and yields them as they complete, so the order of the rows
changes. This module builds the DataFrame; the code that runs in the tasks is in ``pipemax_spark.executor.task``.
"""

import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from pipemax.wire import GenerationSpec, PreflightRequest
from pipemax_spark.engines.check import recent_preflight
from pipemax_spark.engines.config import engine_config, engine_options, with_engine_settings
from pipemax_spark.errors import JobError, OnError
from pipemax_spark.executor.client import EngineOptions
from pipemax_spark.executor.questions import Question
from pipemax_spark.executor.requests import KEY_COLUMN
from pipemax_spark.executor.spool import dealt_directory, spool_fault
from pipemax_spark.executor.task import TaskPlan
from pipemax_spark.request.argument_types import checked_arguments, checks_arguments, takes_fields
from pipemax_spark.request.columns import RequestColumns
from pipemax_spark.request.formats import ResponseFormat
from pipemax_spark.request.generation import check_pooling, generation_values, with_image_settings, with_task
from pipemax_spark.request.prompts import PromptSource
from pipemax_spark.request.questions import read_questions
from pipemax_spark.request.spec import AnnotationSpec
from pipemax_spark.rows.annotated import ANNOTATION, annotate_requests, annotated_schema
from pipemax_spark.spark.executor_call import call_on_executor
from pipemax_spark.spark.helper_columns import name_in
from pipemax_spark.spark.limits import warn_of_limits
from pipemax_spark.spark.slots import annotating_slots

if TYPE_CHECKING:
    from pyspark.resource import ResourceProfile
    from pyspark.sql import DataFrame, SparkSession

TemplateVariables = Mapping[str, Any] | str | None
"""The type of ``chat_template_kwargs`` that functions show."""


@checks_arguments
@takes_fields(
    GenerationSpec,
    response_format=ResponseFormat,
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
    path, a URL whose host is in ``allow_image_urls``), or an array of images. ``overrides_column`` is a struct of its
    row's own settings, such as max_tokens; docs/guide/input.md has all. ``generation`` takes ``system``
    and the settings of all rows, as the signature shows them. ``response_format`` is a JSON schema (dict or text), a
    schema in ``ai_query``'s envelope, the class of a Pydantic model, or a Spark type such as
    ``"STRUCT<label: STRING, score: DOUBLE>"``, which is then the type of ``parsed``;
    ``pipemax_spark.executor.response_format`` shows which type a JSON schema becomes. Instead of it, ``choice`` (a list
    of texts), ``regex`` or ``grammar`` constrain the text. ``profile`` is the
    ``ResourceProfile`` of executors with GPUs (``pipemax_spark.spark.profiles.gpu_profile``), for a session whose own
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
    image_config = with_image_settings(
        engine_config(engine, model), has_images=has_images, allow_urls=allow_image_urls
    )
    config, spec_of_all = with_task(image_config, generation_spec(**generation))
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


def checked_spec(
    spark: "SparkSession",
    options: EngineOptions,
    source: PromptSource | None,
    profile: "ResourceProfile | None" = None,
    *,
    questions: Sequence[Question] = (),
    time_zone: str | None = None,
    has_images: bool = False,
    examples: Mapping[str, GenerationSpec] = MappingProxyType({}),
) -> tuple[AnnotationSpec, EngineOptions]:
    """Return the spec, and the options with the settings that the engine needs, once an executor has checked them.

    Raise ``JobError`` if engine or generation are not fine.

    A check that passed within the last ten minutes is not repeated. ``examples`` are settings, by a name, that rows may
    have and that are no part of the spec.
    """
    request = PreflightRequest(
        engine=dict(options.engine),
        generation=options.generation,
        questions=(*options.questions, *examples.values()),
        question_names=(*(question.name for question in questions), *examples),
        has_images=has_images,
    )
    reply = recent_preflight(spark, request, options, profile=profile)
    for line in reply.warnings:
        warnings.warn(line, stacklevel=2)
    spec = AnnotationSpec.of(
        reply, source=source, generation=options.generation, questions=questions, time_zone=time_zone
    )
    return spec, with_engine_settings(options, reply)


def generation_spec(**arguments: Any) -> GenerationSpec:
    """Build the spec from what users give.

    ``JobError`` says what is wrong with the schema, ``TypeError`` names an unknown field.
    """
    values = checked_arguments(
        annotate, {name: value for name, value in arguments.items() if value is not None}
    )
    return GenerationSpec(**generation_values(values))


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
