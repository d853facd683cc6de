"""A DataFrame in, the same rows with one more column out: ``annotation``, a struct with the model's answer.

Each task sends its rows to its executor's engine server and yields them as they complete, so rows change their
order. This module builds the DataFrame; what runs in the tasks is ``pipemax_spark.executor.task``.
"""

import json
import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pipemax.wire import GenerationSpec, PreflightRequest
from pipemax_spark.engine_check import recent_preflight
from pipemax_spark.errors import JobError, OnError
from pipemax_spark.executor.client import EngineOptions
from pipemax_spark.executor.response_format import compile_schema, load_schema
from pipemax_spark.executor.spool import dealt_directory, spool_fault
from pipemax_spark.executor.task import KEY_COLUMN, AnnotateTask, TaskPlan, annotation_type
from pipemax_spark.keywords import takes_fields
from pipemax_spark.profiles import discovery_script_of
from pipemax_spark.prompts import PromptSource, find_field
from pipemax_spark.request_columns import RequestColumns, without_request_columns
from pipemax_spark.slots import slots_of
from pipemax_spark.spec import AnnotationSpec

if TYPE_CHECKING:
    from pyspark.resource import ResourceProfile
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

ANNOTATION = "annotation"


@takes_fields(GenerationSpec, response_format=Mapping[str, Any] | str | None)
def annotate(
    df: "DataFrame",
    *,
    model: str | None = None,
    engine: Mapping[str, Any] | None = None,
    prompt_column: str | None = None,
    messages_column: str | None = None,
    template: str | None = None,
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
    """``df`` with one more column, a struct {text, parsed (with a ``response_format``), finish_reason,
    prompt_tokens, completion_tokens, error {code, message}, spec_hash, run_id, completed_at}.

    Give ``model`` or an ``engine`` config (a dict of its YAML) that names one, and one of ``prompt_column``,
    ``messages_column`` (array<struct<role, content>>) and ``template`` (such as ``"Summarise: {text}"``).
    ``overrides_column`` is a struct with any of max_tokens, temperature, top_p, top_k, seed, stop for its row.
    ``generation`` is all that ``GenerationSpec`` has: system, max_tokens, temperature, top_p, top_k, stop, seed and
    response_format, which is a JSON schema; how it becomes a type is in ``pipemax_spark.executor.response_format``.
    ``profile`` is the ``ResourceProfile`` of executors with GPUs (``pipemax_spark.profiles.gpu_profile``), for a
    session whose own executors have none.

    With ``work_dir``, a directory on storage that all executors see, tasks keep their completions there every 10 s:
    a task that is tried again, or a second action over this result, asks the engine for the rest alone. With
    ``resume``, a name, so does a later application that makes the same call under it: rows are then dealt to
    partitions by their content (a shuffle), and found again in whatever order they come. All is kept in
    ``work_dir/pipemax/annotate``. Nothing there is deleted here, because only the caller knows when the result is safe:
    delete the directory then.

    The result is lazy, like any transformation, and every action evaluates it anew: write it to a table before
    using it twice. A small Spark job runs at once: it checks model, engine and schema on an executor, without
    starting an engine (not again within ten minutes). ``JobError``, a ``ValueError``, says what is wrong and what
    to do.
    """
    source = PromptSource(prompt_column=prompt_column, messages_column=messages_column, template=template)
    columns = RequestColumns(source, overrides_column)
    _check_work_dir(work_dir, resume)
    policy = OnError.of(on_error)
    options = engine_options(
        df.sparkSession,
        engine_config(engine, model),
        generation_spec(**generation),
        engine_python=engine_python,
        log_dir=log_dir,
        profile=profile,
    )
    # Wrong columns are found before the executors are asked.
    annotated_schema(df.schema, output_column, options.generation)
    requests = columns.add(df) if work_dir is None else columns.add_with_keys(df)
    spec = checked_spec(df.sparkSession, options, source, profile, time_zone=source.time_zone(df))
    plan = TaskPlan(
        options=options,
        spec_hash=spec.hash,
        run_id=options.job_id,
        output_column=output_column,
        on_error=policy,
    )
    if work_dir is not None:
        requests, plan = _with_spool(requests, plan, _spool_root(work_dir), resume)
    return annotate_requests(requests, plan, profile)


def engine_options(
    spark: "SparkSession",
    engine: Mapping[str, Any],
    generation: GenerationSpec,
    *,
    engine_python: str | None,
    log_dir: str | None,
    run_id: str | None = None,
    reuses_results: bool = False,
    profile: "ResourceProfile | None" = None,
) -> EngineOptions:
    """Of a run, a new one unless named."""
    return EngineOptions(
        engine=engine,
        generation=generation,
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
    time_zone: str | None = None,
) -> AnnotationSpec:
    """The spec, once an executor has found engine and generation fine, now or just before; else ``JobError``."""
    request = PreflightRequest(engine=dict(options.engine), generation=options.generation)
    reply = recent_preflight(spark, request, options, profile=profile)
    return AnnotationSpec.of(reply, source=source, generation=options.generation, time_zone=time_zone)


def annotate_requests(
    requests: "DataFrame", plan: TaskPlan, profile: "ResourceProfile | None" = None
) -> "DataFrame":
    """Rows with their request columns (``RequestColumns.add``) into annotated rows, without any check."""
    own = [field for field in without_request_columns(requests).schema.fields if field.name != KEY_COLUMN]
    schema = annotated_schema(type(requests.schema)(own), plan.output_column, plan.options.generation)
    return requests.mapInArrow(AnnotateTask(plan), schema, profile=profile)


def annotated_schema(
    input_schema: "StructType", output_column: str, generation: GenerationSpec
) -> "StructType":
    """The Spark schema of the result. ``JobError`` where the input has a column of the result's name."""
    from pyspark.sql.pandas.types import from_arrow_type
    from pyspark.sql.types import StructField, StructType

    if find_field(output_column, input_schema) is not None:
        raise JobError(
            f"the input has a column {output_column!r} already, which is what the result's column is called; "
            "rename or drop it first"
        )
    annotation = from_arrow_type(annotation_type(generation), prefer_timestamp_ntz=False)
    return StructType([*input_schema.fields, StructField(output_column, annotation)])


def engine_config(engine: Mapping[str, Any] | None, model: str | None) -> dict[str, Any]:
    """The engine config with ``model``, where given, in place of its own. ``JobError`` without any."""
    config = {**(engine or {}), **({} if model is None else {"model": model})}
    if not config.get("model"):
        raise JobError("no model is named; give model (--model), or an engine config with a line 'model: …'")
    return config


def generation_spec(
    *, stop: Sequence[str] = (), response_format: Mapping[str, Any] | str | None = None, **values: Any
) -> GenerationSpec:
    """From what users give. ``JobError`` says what is wrong with the schema, ``TypeError`` names an unknown field."""
    if response_format is not None:
        response_format = checked_schema(
            response_format if isinstance(response_format, str) else json.dumps(response_format)
        )
    return GenerationSpec(stop=tuple(stop), response_format=response_format, **values)


def checked_schema(text: str) -> str:
    """This JSON schema, when this side finds nothing wrong with it; else ``JobError``."""
    try:
        compile_schema(load_schema(text))
    except ValueError as error:
        raise JobError(str(error)) from error
    return text


def _check_work_dir(work_dir: str | None, resume: str | None) -> None:
    if resume is not None and work_dir is None:
        raise JobError(f"resume={resume!r} names what is kept in work_dir; give that too")
    if resume is not None and not re.fullmatch(r"\w[\w.-]*", resume):
        raise JobError(f"resume={resume!r} must be a name of letters, digits, '_', '-' and '.'")
    if work_dir is not None and (fault := spool_fault(_spool_root(work_dir))):
        raise JobError(
            f"work_dir={work_dir!r} cannot be written to ({fault}); name one that all executors see"
        )


def _spool_root(work_dir: str) -> str:
    """Apart from the jobs' directories, which are named after their tables' ids."""
    return f"{work_dir.rstrip('/')}/pipemax/annotate"


def _with_spool(
    keyed: "DataFrame", plan: TaskPlan, root: str, resume: str | None
) -> "tuple[DataFrame, TaskPlan]":
    """The rows, which have keys, and the plan so that tasks find what earlier ones completed."""
    if resume is None:
        return keyed, replace(plan, spool=f"{root}/{plan.run_id}")
    spark = keyed.sparkSession
    wanted = max(int(spark.conf.get("spark.sql.shuffle.partitions") or 0), 2 * slots_of(spark).total)
    directory, partitions = dealt_directory(f"{root}/{resume}-{plan.spec_hash}", wanted)
    return keyed.repartition(partitions, KEY_COLUMN), replace(plan, spool=directory)
