"""Check a job for everything that can be wrong, before it writes anything or starts an engine."""

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from pipemax.wire import PreflightReply, PreflightRequest
from pipemax_spark.engines.check import run_preflight
from pipemax_spark.engines.config import engine_options, with_engine_settings
from pipemax_spark.errors import JobError
from pipemax_spark.executor.client import EngineOptions
from pipemax_spark.executor.task import TaskPlan
from pipemax_spark.job.batches import check_follows
from pipemax_spark.job.fit import check_columns_fit, check_types_kept, check_values_kept
from pipemax_spark.job.job import EngineCall, JobCall
from pipemax_spark.job.replacing import replaces_specs
from pipemax_spark.job.reuse import Reuse
from pipemax_spark.options import JobOptions
from pipemax_spark.report.policy_notes import wants_row_lengths
from pipemax_spark.report.summary import counted
from pipemax_spark.request.generation import with_image_settings
from pipemax_spark.request.prompts import find_field, resolve_column, resolve_names, template_names
from pipemax_spark.request.spec import AnnotationSpec
from pipemax_spark.rows.annotated import ANNOTATION, holds_annotations, output_schema
from pipemax_spark.rows.checked import Checked
from pipemax_spark.rows.id_columns import check_columns, check_id_type
from pipemax_spark.rows.order_by import check_order
from pipemax_spark.rows.remaining import rows_where
from pipemax_spark.rows.sample import sample_requests
from pipemax_spark.rows.unique_ids import check_input_ids
from pipemax_spark.rows.volatile import check_steady
from pipemax_spark.spark.slots import slots_of
from pipemax_spark.spark.sql import quoted, split_names
from pipemax_spark.storage.bad_lines import checked_rows
from pipemax_spark.storage.openai_batch import FORMAT as BATCH_FORMAT
from pipemax_spark.storage.openai_batch import ID_COLUMN as BATCH_ID
from pipemax_spark.storage.output_table import OutputTable
from pipemax_spark.storage.sources import Source, read_source
from pipemax_spark.storage.spec_properties import spec_texts

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.types import StructType

_MESSAGES, _OVERRIDES = "array<struct<role: string, content: string>>", "struct<max_tokens: int>"


def check_job(call: JobCall) -> Checked:
    """Check the whole job. Raise ``JobError`` for a fault."""
    options, terminal = call.options, call.terminal
    source = input_of(call)
    if options.incremental and not source.tells_appends:
        raise JobError(
            f"--incremental reads what was appended to a Delta or Iceberg table, but it is {source.description}; "
            "leave it out: a run without it also annotates only the rows that are left"
        )
    source, rows_in = _with_checked_rows(call, source)
    schema, id_columns = _check_columns(source, options)
    check_follows(call, source, schema)
    check_steady(
        source.rows,
        name=source.name,
        where=None if source.is_blank else options.where,
        id_columns=id_columns,
        requests=options.request_columns,
    )
    if options.order_by is not None and not source.is_blank:
        check_order(source.rows, options.order_by, name=source.name)
    call.table.check_usable(replaces=options.replacing)
    if call.table.exists():
        _check_output(call, source, schema, id_columns)
    unique_ids = None
    if not options.incremental:  # else each batch is checked
        if id_columns:
            unique_ids = check_input_ids(call.table, source, options, id_columns)
        check_values_kept(call, source.rows, schema, id_columns)
    rows_in = source.rows.count() if rows_in is None else rows_in
    condition = "" if options.where is None else f" where {options.where}"
    terminal.say("Input", f"{source.description}: {rows_in:,} rows{condition}")
    if not options.incremental:
        options.check_row_count(rows_in, source=f"input {source.name!r}{condition}")
    counts_tokens = options.dry_run or options.max_tokens_total is not None
    counts_tokens |= options.max_cost is not None and options.prices.has_tokens
    engine_options, reply = check_engine(call, source.rows, rows_in, samples=counts_tokens)
    spec = AnnotationSpec.of(
        reply,
        source=options.source,
        generation=options.generation,
        questions=options.ask,
        time_zone=options.request_columns.time_zone(source.rows),
        cascade=None if options.certified is None else options.certified.spec,
    )
    _check_spec(spec, call.table, allows_new=options.new_spec is not None)
    if options.retry_errors and not id_columns:
        _check_one_kind_replaced(call, spec)
    plan = TaskPlan(
        options=engine_options,
        spec_hash=spec.hash,
        run_id=call.run_id,
        output_column=ANNOTATION,
        questions=options.ask,
        on_error=options.on_error,
        quotes_rows=not options.no_sample,
        answered_by=None if options.certified is None else options.certified.model,
    )
    checked = Checked(
        source=source,
        rows_in=rows_in,
        schema=schema,
        id_columns=id_columns,
        reply=reply,
        spec=spec,
        plan=plan,
        unique_ids=unique_ids,
    )
    if (reuse := Reuse.of(call, checked)) is not None and not source.is_blank:
        reuse.check()
    return checked


def input_of(call: EngineCall) -> Source:
    """Return the input. Raise ``JobError`` if there is none."""
    options = call.options
    return read_source(
        call.spark,
        options.input,
        file_format=options.input_format,
        options=options.input_option,
        bad_lines=options.bad_lines,
        warn=call.terminal.warn,
    )


def check_engine(
    call: EngineCall, rows: "DataFrame", rows_in: int, *, samples: bool = False
) -> tuple[EngineOptions, PreflightReply]:
    """Check the engine's config, its model and the schema on an executor, and return the engine's options.

    They have what the check has found: settings, and the lengths of rows on which the policy depends. With ``samples``
    the reply counts the tokens of sampled rows, whether or not the policy needs them.
    """
    options, spark = call.options, call.spark
    if "\\n" in (options.generation.system or ""):
        call.terminal.warn(
            r"the system message has \n as two characters, not as a line break; in bash, write --system $'…\n…'"
        )
    has_images = options.source.has_images(rows.schema)
    config = with_image_settings(options.engine, has_images=has_images, allow_urls=options.allow_image_urls)
    is_here = not options.over_connect and (spark.conf.get("spark.master", None) or "").startswith("local")
    asked = engine_options(
        spark,
        config,
        options.generation,
        questions=options.ask,
        run_id=call.run_id,
        engine_python=options.engine_python,
        # This path means nothing on other nodes, so servers log next to their sockets there.
        log_dir=str(options.log_dir) if is_here else None,
        reuses_results=not options.compute_each,
    )
    samples = samples or wants_row_lengths(config)
    request = PreflightRequest(
        engine=dict(asked.engine),
        generation=options.generation,
        questions=asked.questions,
        question_names=tuple(question.name for question in options.ask),
        requests=sample_requests(rows, options.request_columns, rows_in) if samples else [],
        rows=math.ceil(rows_in / slots_of(spark).executors) if rows_in else None,
        has_images=has_images,
    )
    reply = run_preflight(spark, request, asked)
    for line in reply.warnings:
        call.terminal.warn(line)
    call.terminal.say("Model", _model_line(reply))
    asked = with_engine_settings(asked, reply)
    if reply.row_lengths is not None:
        asked = replace(asked, engine={**asked.engine, "row_lengths": reply.row_lengths})
    return asked, reply


def _model_line(reply: PreflightReply) -> str:
    where = ""
    if addresses := reply.engine.get("endpoint"):
        where = f" at {counted(len(addresses), 'endpoint')}"
    if not reply.max_model_len:
        return f"{reply.model}{where}, which does not say how many tokens prompt and output may have"
    return f"{reply.model}{where}, prompt and output at most {reply.max_model_len:,} tokens"


def _with_checked_rows(call: JobCall, source: Source) -> tuple[Source, int | None]:
    """Return the source with the rows that ``--where`` selects, and their number, if it is known already.

    Raise ``JobError`` for text files with lines that are no rows.
    """
    options, rows_in = call.options, None
    if source.text is not None:
        rows, rows_in = checked_rows(
            source.text,
            where=options.where,
            bad_lines=options.bad_lines,
            warn=call.terminal.warn,
            shows_values=not options.no_sample,
        )
        source = replace(source, rows=rows, is_blank=not rows.columns)
    if source.is_blank:
        return replace(source, rows=_no_rows_for(call)), 0
    return replace(source, rows=rows_where(source.rows, options.where)), rows_in


def _no_rows_for(call: JobCall) -> "DataFrame":
    """Return no rows, with columns that pass the job's checks, for an input that has neither rows nor columns.

    Such an input, as a JSON file of 0 bytes, is an empty one: there is nothing to annotate, and no column to complain
    about. The columns that the job names, or that its output has, are put in the place of those that are not there.
    """
    from pyspark.sql.types import StructType

    spark, options, table = call.spark, call.options, call.table
    answers = {ANNOTATION, *(question.name for question in options.ask)}
    known = table.read().schema if table.exists() else StructType()
    held = [field for field in known.fields if field.name not in answers]
    names = {field.name.lower() for field in held}
    named = [
        f"{quoted(name)} {kind}"
        for name, kind in _named_columns(options).items()
        if name.lower() not in names
    ]
    if not held:
        return spark.createDataFrame([], ", ".join(named))
    rows = spark.createDataFrame([], StructType(held))
    return rows.crossJoin(spark.createDataFrame([], ", ".join(named))) if named else rows


def _named_columns(options: JobOptions) -> dict[str, str]:
    """Return the columns that the options name, each with a type that it may have."""
    source = options.source
    templates = [source.template, *(question.template for question in options.ask)]
    placeholders = [name for text in templates for name in template_names(text or "")]
    texts = [*placeholders, source.prompt_column, source.query_column, source.image_column]
    kinds: dict[str, str] = {}
    batch = [BATCH_ID, "url"] if options.input_format == BATCH_FORMAT else []
    golds = [gold.column for gold in options.golds]
    for name in [*texts, *options.id_columns, *options.select, *golds, *batch]:
        column, *inner = split_names(name or "", ".") or [""]
        if column and column.lower() not in map(str.lower, kinds):
            kinds[column] = f"struct<{quoted('.'.join(inner))}: string>" if inner else "string"
    for name, kind in ((source.messages_column, _MESSAGES), (options.overrides_column, _OVERRIDES)):
        if name is not None:
            kinds[name] = kind
    return kinds


def _check_columns(source: Source, options: JobOptions) -> "tuple[StructType, tuple[str, ...]]":
    """Check the input's columns.

    Return those that go to the output, and the id columns by the names that they have in the input.
    """
    columns = options.request_columns
    check_types_kept(source.rows.schema)
    schema = columns.output_schema(source.rows.schema)
    output_schema(schema, options)
    columns.add(source.rows)
    if options.batch_output is not None:
        for name in (BATCH_ID, "url"):
            if find_field(name, schema) is None:
                raise JobError(
                    f"--batch-output needs the column {name!r} of --input-format {BATCH_FORMAT} in the output"
                )
    id_columns = tuple(resolve_names(options.id_columns, source.rows.schema))
    for name in (*id_columns, *(gold.column for gold in options.golds)):
        resolve_column(name, source.rows.schema)
        if find_field(name, schema) is None:
            raise JobError(f"--select leaves out {name!r}, which the output needs; add it")
    for name in id_columns:
        check_id_type(source.rows.schema[name])
    return schema, id_columns


def _check_output(call: JobCall, source: Source, schema: "StructType", id_columns: tuple[str, ...]) -> None:
    """Check that the table accepts rows with these columns, and that its rows can be matched and replaced."""
    options, table = call.options, call.table
    known = table.read().schema
    is_annotated = holds_annotations(known)
    lacks_columns = not is_annotated or any(find_field(name, known) is None for name in schema.names)
    is_empty = lacks_columns and table.read().isEmpty()
    if not is_annotated and not is_empty:
        raise JobError(f"output {table.name!r} holds rows without annotations; name another one")
    # An empty table has no rows to match, so it may lack any column.
    ids = () if is_empty else id_columns
    check_columns(table.stored(schema), known, ids, only_appended=options.incremental or is_empty)
    check_columns_fit(call, schema, id_columns)
    if options.replacing and table.properties().get("delta.appendOnly", "").lower() == "true":
        raise JobError(
            f"{options.replacing} replaces rows, and output {table.name!r} has delta.appendOnly set"
        )
    if options.redo_changed and is_annotated:
        _check_requests_kept(source.rows.select(*map(quoted, schema.names)), options, table)


def _check_requests_kept(kept: "DataFrame", options: JobOptions, table: OutputTable) -> None:
    """Raise ``JobError`` if the output's rows lack, or will lack, the columns of their requests."""
    for rows, where in ((table.read(), f"output {table.name!r}"), (kept, "--select")):
        try:
            options.request_columns.add(rows)
        except JobError as error:
            raise JobError(
                f"--redo-changed compares each row's prompt with the prompt that its row in the output had, but "
                f"{where} lacks a column for it: {error}"
            ) from error


def _check_spec(spec: AnnotationSpec, table: OutputTable, *, allows_new: bool) -> None:
    """Raise ``JobError`` if the output holds rows of another spec that is not allowed."""
    if not table.exists():
        return
    known = spec_texts(table.properties())
    if not known or spec.hash in known or allows_new:
        return
    latest = AnnotationSpec.from_json(list(known.values())[-1])
    raise JobError(
        f"output {table.name!r} holds rows that were annotated in another way: "
        f"{'; '.join(spec.changes_from(latest))}. Name another output, or annotate all rows again: --new-spec "
        f"replace removes each old row in the commit that brings its new one, --new-spec stack keeps them "
        f"({ANNOTATION}.spec_hash distinguishes them)"
    )


def _check_one_kind_replaced(call: JobCall, spec: AnnotationSpec) -> None:
    """Raise ``JobError`` if a retried row without ids could replace an error row or a row of another spec."""
    table = call.table
    if not table.exists() or not holds_annotations(table.read().schema):
        return
    if replaces_specs(table, call.options.new_spec, spec.hash):
        raise JobError(
            f"output {table.name!r} holds rows of other specs that are being replaced (--new-spec replace), and "
            "without --id-columns a retried row may be one of these or an error row; give --retry-errors once they "
            "are replaced"
        )
