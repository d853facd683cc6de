"""Stand in for the rows of an input that has neither rows nor columns, such as a JSON file of 0 bytes.

Such an input is an empty one: there is nothing to annotate, and no column to complain about. The columns that the job
names, or that its output has, are put in the place of those that are not there.
"""

from typing import TYPE_CHECKING

from pipemax_spark.job.job import JobCall
from pipemax_spark.options import JobOptions
from pipemax_spark.request.prompts import template_names
from pipemax_spark.rows.annotated import ANNOTATION
from pipemax_spark.spark.sql import quoted, split_names
from pipemax_spark.storage.openai_batch import FORMAT as BATCH_FORMAT
from pipemax_spark.storage.openai_batch import ID_COLUMN as BATCH_ID

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_MESSAGES, _OVERRIDES = "array<struct<role: string, content: string>>", "struct<max_tokens: int>"


def no_rows_for(call: JobCall) -> "DataFrame":
    """Return no rows, with columns that pass the job's checks."""
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
    for name in [*texts, *options.id_columns, *options.select, options.gold_column, *batch]:
        column, *inner = split_names(name or "", ".") or [""]
        if column and column.lower() not in map(str.lower, kinds):
            kinds[column] = f"struct<{quoted('.'.join(inner))}: string>" if inner else "string"
    for name, kind in ((source.messages_column, _MESSAGES), (options.overrides_column, _OVERRIDES)):
        if name is not None:
            kinds[name] = kind
    return kinds
