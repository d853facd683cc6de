"""The rows with their annotations: the name and type of the column, and the stage of Spark that fills it."""

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pipemax.wire import GenerationSpec
from pipemax_spark.errors import JobError
from pipemax_spark.executor.questions import Question
from pipemax_spark.executor.requests import KEY_COLUMN
from pipemax_spark.executor.task import AnnotateTask, TaskPlan, annotation_type
from pipemax_spark.options import JobOptions
from pipemax_spark.request.columns import without_request_columns
from pipemax_spark.request.prompts import find_field
from pipemax_spark.spark.arrow_types import arrow_type
from pipemax_spark.spark.helper_columns import map_rows, name_in
from pipemax_spark.spark.slots import annotating_profile

if TYPE_CHECKING:
    from pyspark.resource import ResourceProfile
    from pyspark.sql import DataFrame
    from pyspark.sql.types import StructField, StructType


ANNOTATION = "annotation"


def annotate_requests(
    requests: "DataFrame", plan: TaskPlan, profile: "ResourceProfile | None" = None
) -> "DataFrame":
    """Annotate rows that have their request columns (``RequestColumns.add``), without any check.

    Without a ``profile``, the stage gets the profile of ``annotating_profile``, if any.
    """
    profile = profile or annotating_profile(requests.sparkSession)
    key = name_in(KEY_COLUMN, requests.columns)
    fields = [field for field in without_request_columns(requests).schema.fields if field.name != key]
    kept = type(requests.schema)(fields)
    names_model = plan.answered_by is not None
    schema = annotated_schema(
        kept, plan.output_column, plan.options.generation, plan.questions, names_model=names_model
    )
    return map_rows(requests, AnnotateTask(plan), schema, profile=profile)


def annotated_schema(
    input_schema: "StructType",
    output_column: str,
    generation: GenerationSpec,
    questions: Sequence[Question] = (),
    *,
    names_model: bool = False,
) -> "StructType":
    """Return the Spark schema of the result.

    With ``questions``, each has a column, and the result's column says what became of the row as a whole. With
    ``names_model`` the annotation says which model has answered (``TaskPlan.answered_by``). Raise ``JobError`` if the
    input already has a column of such a name.
    """
    from pyspark.sql.pandas.types import from_arrow_type
    from pyspark.sql.types import StructField, StructType

    _check_carried(input_schema)
    kinds = {question.name: question.generation for question in questions}
    kinds[output_column] = GenerationSpec() if questions else generation
    added = []
    for name, spec in kinds.items():
        if find_field(name, input_schema) is not None:
            raise JobError(
                f"the input already has a column {name!r}, which is the name of the result's column; rename or drop it "
                "first"
            )
        kind = annotation_type(spec, names_model=names_model)
        added.append(StructField(name, from_arrow_type(kind, prefer_timestamp_ntz=False)))
    return StructType([*input_schema.fields, *added])


def output_schema(schema: "StructType", options: JobOptions) -> "StructType":
    """Return the schema of a job's output, whose rows have the columns of ``schema`` and their annotations."""
    names_model = options.certified is not None
    return annotated_schema(schema, ANNOTATION, options.generation, options.ask, names_model=names_model)


def holds_annotations(schema: "StructType") -> bool:
    """Tell whether a table with this schema can hold annotated rows."""
    return (field := find_field(ANNOTATION, schema)) is not None and is_annotation(field)


def is_annotation(field: "StructField") -> bool:
    """Tell whether a table's column holds annotations, or the answers to a question."""
    from pyspark.sql.types import StructType

    return isinstance(field.dataType, StructType) and {"spec_hash", "error"} <= set(field.dataType.names)


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
