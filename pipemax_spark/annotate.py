"""A DataFrame in, the same rows with one more column out: ``annotation``, a struct with the model's answer.

Each task sends its rows to its executor's engine server and yields them as they complete, so rows change their
order. This module builds the DataFrame; what runs in the tasks is ``pipemax_spark.executor.task``.
"""

import json
import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pyarrow as pa

from pipemax.wire import GenerationSpec, PreflightRequest
from pipemax_spark.engine_check import recent_preflight
from pipemax_spark.errors import JobError
from pipemax_spark.executor.client import EngineOptions
from pipemax_spark.executor.response_format import compile_schema, load_schema
from pipemax_spark.executor.spool import dealt_directory, spool_fault
from pipemax_spark.executor.task import (
    KEY_COLUMN,
    MESSAGES_COLUMN,
    OVERRIDE_FIELDS,
    OVERRIDES_COLUMN,
    PROMPT_COLUMN,
    AnnotateTask,
    TaskPlan,
)
from pipemax_spark.profiles import discovery_script_of
from pipemax_spark.prompts import PromptSource, find_field, resolve_column
from pipemax_spark.slots import slots_of
from pipemax_spark.spec import AnnotationSpec
from pipemax_spark.sql import quoted

ANNOTATION = "annotation"


def annotate(
    df: Any,
    *,
    model: str | None = None,
    engine: Mapping[str, Any] | None = None,
    prompt_column: str | None = None,
    messages_column: str | None = None,
    template: str | None = None,
    overrides_column: str | None = None,
    system: str | None = None,
    response_format: Mapping[str, Any] | str | None = None,
    max_tokens: int = 256,
    temperature: float = 0.0,
    top_p: float = 1.0,
    top_k: int = 0,
    stop: Sequence[str] = (),
    seed: int | None = None,
    on_error: str = "row",
    engine_python: str | None = None,
    log_dir: str | None = None,
    output_column: str = ANNOTATION,
    work_dir: str | None = None,
    resume: str | None = None,
    profile: Any = None,
) -> Any:
    """``df`` with one more column, a struct {text, parsed (with a ``response_format``), finish_reason,
    prompt_tokens, completion_tokens, error {code, message}, spec_hash, run_id, completed_at}.

    Give ``model`` or an ``engine`` config (a dict of its YAML) that names one, and one of ``prompt_column``,
    ``messages_column`` (array<struct<role, content>>) and ``template`` (such as ``"Summarise: {text}"``).
    ``overrides_column`` is a struct with any of max_tokens, temperature, top_p, top_k, seed, stop for its row.
    ``response_format`` is a JSON schema; how it becomes a type is in ``pipemax_spark.executor.response_format``.
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
    _check_work_dir(work_dir, resume)
    config = engine_config(engine, model)
    generation = GenerationSpec(
        system=system,
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        stop=tuple(stop),
        seed=seed,
        response_format=schema_text(response_format),
    )
    plan = draft_plan(
        df.sparkSession,
        config,
        generation,
        output_column=output_column,
        fails_on_error=fails_on_error(on_error),
        engine_python=engine_python,
        log_dir=log_dir,
        profile=profile,
    )
    # Wrong columns are found before the executors are asked.
    annotated_schema(df.schema, plan)
    prepare_columns(df, source, overrides_column)
    plan = checked_plan(df.sparkSession, plan, source, profile, time_zone=source.time_zone(df))
    if work_dir is not None:
        df, plan = _with_spool(with_keys(df, source, overrides_column), plan, _spool_root(work_dir), resume)
    return annotate_with(df, source, plan, overrides_column=overrides_column, profile=profile)


def draft_plan(
    spark: Any,
    engine: Mapping[str, Any],
    generation: GenerationSpec,
    *,
    output_column: str,
    fails_on_error: bool,
    engine_python: str | None,
    log_dir: str | None,
    run_id: str | None = None,
    reuses_results: bool = False,
    profile: Any = None,
) -> TaskPlan:
    """The plan of a run, a new one unless named, before anybody has checked it: its spec's hash is still to come."""
    run_id = run_id or uuid.uuid4().hex
    return TaskPlan(
        options=EngineOptions(
            engine=engine,
            generation=generation,
            job_id=run_id,
            engine_python=engine_python,
            gpu_discovery_script=discovery_script_of(spark, profile),
            log_dir=log_dir,
            reuses_results=reuses_results,
        ),
        spec_hash="",
        run_id=run_id,
        output_column=output_column,
        fails_on_error=fails_on_error,
    )


def checked_plan(
    spark: Any,
    plan: TaskPlan,
    source: PromptSource | None,
    profile: Any = None,
    *,
    time_zone: str | None = None,
) -> TaskPlan:
    """The plan with its spec's hash, once an executor has found engine and generation fine, now or just before; else
    ``JobError``."""
    options = plan.options
    request = PreflightRequest(engine=dict(options.engine), generation=options.generation)
    reply = recent_preflight(spark, request, options, profile=profile)
    spec = AnnotationSpec.of(reply, source=source, generation=options.generation, time_zone=time_zone)
    return replace(plan, spec_hash=spec.hash)


def annotate_with(
    df: Any,
    source: PromptSource,
    plan: TaskPlan,
    *,
    overrides_column: str | None = None,
    profile: Any = None,
) -> Any:
    """As ``annotate``, from a ready plan and without any check on the executors; ``df`` may have a key column."""
    own = [field for field in df.schema.fields if field.name != KEY_COLUMN]
    prepared = prepare_columns(df, source, overrides_column)
    return map_rows(prepared, type(df.schema)(own), plan, profile)


def prepare_columns(df: Any, source: PromptSource, overrides_column: str | None) -> Any:
    """``df`` with the columns that a task turns into requests."""
    helper = MESSAGES_COLUMN if source.is_messages else PROMPT_COLUMN
    prepared = df.withColumn(helper, source.column(df.schema))
    if overrides_column is not None:
        prepared = prepared.withColumn(OVERRIDES_COLUMN, _overrides(overrides_column, df.schema))
    return prepared


def with_keys(df: Any, source: PromptSource, overrides_column: str | None) -> Any:
    """``df`` with a column of what the spool knows its rows by: all that tells one row's request from another's."""
    from pyspark.sql import functions as F  # noqa: N812

    prepared = prepare_columns(df, source, overrides_column)
    asked = [prepared[name] for name in prepared.columns if name not in df.columns]
    key = F.md5(F.to_json(F.struct(*asked)))
    return prepared.select(*(prepared[quoted(name)] for name in df.columns), key.alias(KEY_COLUMN))


def map_rows(prepared: Any, input_schema: Any, plan: TaskPlan, profile: Any = None) -> Any:
    return prepared.mapInArrow(AnnotateTask(plan), annotated_schema(input_schema, plan), profile=profile)


def annotated_schema(input_schema: Any, plan: TaskPlan) -> Any:
    """The Spark schema of the result. ``JobError`` where the input has a column of the result's name."""
    from pyspark.sql.pandas.types import from_arrow_type
    from pyspark.sql.types import StructField, StructType

    if find_field(plan.output_column, input_schema) is not None:
        raise JobError(
            f"the input has a column {plan.output_column!r} already, which is what the result's column is called; "
            "rename or drop it first"
        )
    annotation = from_arrow_type(plan.annotation_type(), prefer_timestamp_ntz=False)
    return StructType([*input_schema.fields, StructField(plan.output_column, annotation)])


def engine_config(engine: Mapping[str, Any] | None, model: str | None) -> dict[str, Any]:
    """The engine config with ``model``, where given, in place of its own. ``JobError`` without any."""
    config = {**(engine or {}), **({} if model is None else {"model": model})}
    if not config.get("model"):
        raise JobError("no model is named; give model (--model), or an engine config with a line 'model: …'")
    return config


def schema_text(response_format: Mapping[str, Any] | str | None) -> str | None:
    """The schema as text, checked as far as this side can. ``JobError`` says what is wrong with it."""
    if response_format is None:
        return None
    text = response_format if isinstance(response_format, str) else json.dumps(response_format)
    try:
        compile_schema(load_schema(text))
    except ValueError as error:
        raise JobError(str(error)) from error
    return text


def fails_on_error(on_error: str) -> bool:
    if on_error not in ("row", "fail"):
        raise JobError(
            f"on-error is {on_error!r}; give 'row' (keep error rows) or 'fail' (end at the first one)"
        )
    return on_error == "fail"


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


def _with_spool(keyed: Any, plan: TaskPlan, root: str, resume: str | None) -> tuple[Any, TaskPlan]:
    """The rows, which have keys, and the plan so that tasks find what earlier ones completed."""
    if resume is None:
        return keyed, replace(plan, spool=f"{root}/{plan.run_id}")
    spark = keyed.sparkSession
    wanted = max(int(spark.conf.get("spark.sql.shuffle.partitions")), 2 * slots_of(spark).total)
    directory, partitions = dealt_directory(f"{root}/{resume}-{plan.spec_hash}", wanted)
    return keyed.repartition(partitions, KEY_COLUMN), replace(plan, spool=directory)


def _overrides(name: str, schema: Any) -> Any:
    from pyspark.sql import functions as F  # noqa: N812

    expression, kind = resolve_column(name, schema)
    names = kind.names if kind.typeName() == "struct" else []
    unknown = sorted(set(names) - OVERRIDE_FIELDS.keys())
    if not names or unknown:
        raise JobError(
            f"overrides-column {name!r} must be a struct with some of {', '.join(OVERRIDE_FIELDS)}; it is "
            f"{kind.simpleString()}"
        )
    column = F.col(expression)
    fields = [
        (column[field] if field in names else F.lit(None)).cast(_SPARK_TYPES[kind]).alias(field)
        for field, kind in OVERRIDE_FIELDS.items()
    ]
    return F.when(column.isNotNull(), F.struct(*fields))


_SPARK_TYPES: dict[pa.DataType, str] = {
    pa.int32(): "int",
    pa.int64(): "bigint",
    pa.float64(): "double",
    pa.list_(pa.string()): "array<string>",
}
